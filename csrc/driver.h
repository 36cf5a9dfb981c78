// Runs work lists and elementwise operations on threads.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "attention.h"
#include "work.h"

namespace onestem {

// A plan for one instruction set and the work lists made of it: one for each type, shape of heads
// and number of threads.
class PreparedPlan {
 public:
  // `costs` empty: what the kernels assume.
  PreparedPlan(Plan plan, const Rules& rules, const Kernels& kernels, std::vector<float> costs)
      : plan_(std::move(plan)), rules_(rules), kernels_(kernels), costs_(std::move(costs)) {}

  const Plan& plan() const { return plan_; }
  const KernelsOf& kernels(Dtype dtype) const { return kernels_.of[dtype]; }
  // The highest page id that a run uses, -1 where none does.
  int64_t last_page() const;
  const WorkList& work(Dtype dtype, const Heads& heads, int32_t threads);

 private:
  using Key = std::tuple<int, int32_t, int32_t, int32_t, int32_t>;

  CostModel cost_model(Dtype dtype) const;

  Plan plan_;
  Rules rules_;
  const Kernels& kernels_;
  std::vector<float> costs_;
  std::mutex mutex_;
  std::map<Key, std::unique_ptr<WorkList>> lists_;
};

// Attends with a plan's work list. The call's `work` and its workspace are filled in here.
void attend(AttentionCall call, PreparedPlan& prepared, Dtype dtype, int32_t threads);

// Multiplies rows of type `x` with a weight; results have type `y`. The call's `packed` is filled in
// here.
void multiply(const Kernels& kernels, LinearCall call, Dtype x, Dtype y, int32_t threads);

// The operations of delta.h, which take parts rather than rows.
void convolve(const KernelsOf& kernels, const ConvCall& call, int64_t rows, int32_t element_bytes,
              int32_t threads);
void apply_delta_rule(const KernelsOf& kernels, const DeltaCall& call, int32_t threads);

// Calls run(begin, end) for pieces of 0..rows-1, on several threads where `bytes` of work deserve it.
void over_rows(int64_t rows, int64_t bytes, int32_t threads,
               const std::function<void(int64_t, int64_t)>& run);

}  // namespace onestem
