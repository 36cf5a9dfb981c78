#include "threads.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifdef __linux__
#include <link.h>
#endif

namespace onestem {
namespace {

// The entry point behind `#pragma omp parallel` in code compiled by GCC. LLVM's and Intel's runtimes
// have it too.
using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

GompParallel g_parallel = nullptr;
std::string g_source = "own pool";

#ifdef __linux__
struct Search {
  std::string folder, found;
};

int visit_library(dl_phdr_info* info, size_t, void* search_pointer) {
  auto* search = static_cast<Search*>(search_pointer);
  const std::string path = info->dlpi_name ? info->dlpi_name : "";
  const size_t name = path.rfind('/') + 1;
  const bool openmp =
      path.compare(name, 7, "libgomp") == 0 || path.compare(name, 7, "libiomp") == 0;
  if (openmp && path.compare(0, search->folder.size(), search->folder) == 0) search->found = path;
  return !search->found.empty();
}

std::string loaded_openmp(const char* folder) {
  Search search{folder, ""};
  dl_iterate_phdr(visit_library, &search);
  return search.found;
}
#else
std::string loaded_openmp(const char*) { return ""; }
#endif

// Workers that sleep until there is something to do. One call at a time; another caller meanwhile
// works alone.
class Pool {
 public:
  void run(int32_t threads, Task task, void* argument) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return task(argument);
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      argument_ = argument;
      wanted_ = threads - 1;
      busy_ = wanted_;
      ++round_;
    }
    wake_.notify_all();
    task(argument);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  void grow(int32_t workers) {
    while (size_ < workers) {
      std::thread(&Pool::work, this, size_++, round_).detach();
    }
  }

  void work(int32_t index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (index >= wanted_) continue;
      const Task task = task_;
      void* argument = argument_;
      lock.unlock();
      task(argument);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  Task task_ = nullptr;
  void* argument_ = nullptr;
  int32_t size_ = 0, wanted_ = 0, busy_ = 0;
  uint64_t round_ = 0;
};

// Never destroyed, since its sleeping workers outlive main; a forked child has none and starts anew.
Pool& pool() {
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (pool == nullptr || owner != getpid()) {
    pool = new Pool;
    owner = getpid();
  }
  return *pool;
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Threads that wait for tasks of the one that leads. Who comes late to a task finds it closed: on a
// machine that others use too, the rest do its work meanwhile.
class Crew {
 public:
  void run(Task task, void* argument) {
    task_ = task;
    argument_ = argument;
    round_ += kRound;
    tell(round_ | kOpen);
    task(argument);
    for (uint32_t state = state_ -= kOpen; state != round_;) state = next(state);
  }

  void serve() {
    uint32_t state = state_, seen = 0;
    while (state != kEnd) {
      if ((state & kOpen) == 0 || state / kRound == seen) {
        state = next(state);
      } else if (state_.compare_exchange_weak(state, state + 1)) {
        seen = state / kRound;
        task_(argument_);
        state = --state_;
        if (state == seen * kRound) state_.notify_all();
      }
    }
  }

  void end() { tell(kEnd); }

 private:
  // How many are inside a task, whether others may still come, and which task it is.
  static constexpr uint32_t kOpen = 1 << 10, kRound = kOpen << 1, kEnd = kRound - 1;
  // A microsecond or some, then some tens: longer than what one thread does alone between tasks. Who
  // yields is least often stopped within a task, where others would wait.
  static constexpr int kSpins = 50, kYields = 200;

  void tell(uint32_t state) {
    state_ = state;
    state_.notify_all();
  }

  // The state once it is another than `old`.
  uint32_t next(uint32_t old) const {
    for (int i = 0; i < kSpins + kYields; ++i) {
      const uint32_t state = state_;
      if (state != old) return state;
      i < kSpins ? pause() : std::this_thread::yield();
    }
    state_.wait(old);
    return state_;
  }

  alignas(64) std::atomic<uint32_t> state_{0};
  Task task_ = nullptr;
  void* argument_ = nullptr;
  uint32_t round_ = 0;
};

thread_local Crew* t_crew = nullptr;  // that this thread leads

void begin_threads(int32_t threads, Task task, void* argument) {
  if (g_parallel != nullptr) {
    return g_parallel(task, argument, static_cast<unsigned>(threads), 0);
  }
  pool().run(threads, task, argument);
}

}  // namespace

void run_on_threads(int32_t threads, Task task, void* argument) {
  if (threads <= 1) return task(argument);
  if (t_crew != nullptr) return t_crew->run(task, argument);
  begin_threads(threads, task, argument);
}

void with_threads(int32_t threads, Task body, void* argument) {
  if (threads <= 1) return body(argument);
  Crew crew;
  std::exception_ptr failure;
  auto part = [&] {
    if (t_crew != &crew) return crew.serve();
    try {
      body(argument);
    } catch (...) {
      failure = std::current_exception();
    }
    crew.end();
  };
  t_crew = &crew;
  begin_threads(threads, [](void* p) { (*static_cast<decltype(part)*>(p))(); }, &part);
  t_crew = nullptr;
  if (failure) std::rethrow_exception(failure);
}

const char* find_openmp(const char* folder) {
  void* symbol = nullptr;
  std::string path = folder == nullptr ? "" : loaded_openmp(folder);
  if (!path.empty()) {
    void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (library != nullptr) symbol = dlsym(library, "GOMP_parallel");
  }
  if (symbol == nullptr) symbol = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  g_parallel = reinterpret_cast<GompParallel>(symbol);
  Dl_info info{};
  const bool known = symbol != nullptr && dladdr(symbol, &info) != 0;
  g_source = symbol == nullptr ? "own pool" : known ? info.dli_fname : "OpenMP";
  return g_source.c_str();
}

const char* thread_source() { return g_source.c_str(); }

}  // namespace onestem
