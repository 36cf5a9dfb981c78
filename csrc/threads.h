// Runs a function on several threads: those of the OpenMP runtime that torch has loaded, so that two
// pools do not fight for the same cores, or of a small pool where there is none.
#pragma once

#include <cstdint>
#include <type_traits>

namespace onestem {

using Task = void (*)(void*);

// Calls task(argument) on `threads` threads at once, the caller's among them, and returns when
// all are done. The task shares out its work itself and must be right on any number of threads, since
// there may be fewer.
void run_on_threads(int32_t threads, Task task, void* argument);

template <class F>
void run_on_threads(int32_t threads, F&& work) {
  using Work = std::remove_reference_t<F>;
  run_on_threads(threads, [](void* w) { (*static_cast<Work*>(w))(); }, &work);
}

// Calls body(argument) with threads held ready between the tasks that it runs: each begins without a call
// of the runtime, and ends without waiting for a thread that has not begun it.
void with_threads(int32_t threads, Task body, void* argument);

template <class F>
void with_threads(int32_t threads, F&& body) {
  using Body = std::remove_reference_t<F>;
  with_threads(threads, [](void* b) { (*static_cast<Body*>(b))(); }, &body);
}

// Looks for an OpenMP runtime that is loaded from under `folder` (null: only among the names that
// all libraries see). Gives where its threads come from.
const char* find_openmp(const char* folder);

// Where the threads come from: a library's path, or "own pool".
const char* thread_source();

}  // namespace onestem
