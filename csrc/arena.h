// Memory that kernels work in.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace onestem {

// A buffer of the thread's own that only grows, so that its memory is touched once and not anew in
// every layer. On a cache line.
class Arena {
 public:
  ~Arena() { std::free(memory_); }
  char* take(size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + kLine - 1) / kLine * kLine;
      memory_ = static_cast<char*>(std::aligned_alloc(kLine, size_));
      if (memory_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }

 private:
  static constexpr size_t kLine = 64;
  char* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace onestem
