// What an item leaves behind: a row's result, or one of its states, and the merge of those.
#pragma once

namespace onestem::ONESTEM_ISA {

// The sum of a query head's row over one item. `values` [dim], not normalised.
struct Partial {
  const float* values;
  float top, sum;
};

// Write values * factor in T.
template <class T>
inline void store_scaled(const float* values, float factor, int32_t dim, T* to) {
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load(values + d) * all(factor));
  if (d < dim) store_some(to + d, load_some(values + d, dim - d) * all(factor), dim - d);
}

// A row's result from its only or merged state. A row that saw nothing is (0, -inf).
template <class T>
inline void store_result(const AttentionCall& call, int64_t row_head, const Partial& part) {
  const bool empty = part.sum == 0.0f;
  call.lse[row_head] = empty ? -kInfinity : part.top * kLn2 + __builtin_logf(part.sum);
  store_scaled(part.values, empty ? 0.0f : 1.0f / part.sum, call.dim,
               static_cast<T*>(call.out) + row_head * call.dim);
}

// Write the state of part number `part` of the work list for a query head.
template <class T>
inline void store_partial(const AttentionCall& call, int32_t part, int32_t head,
                          const Partial& partial) {
  const int32_t state = call.work.states[part];
  if (state < 0) {
    store_result<T>(call, int64_t{call.work.rows[part]} * call.q_heads + head, partial);
    return;
  }
  const int64_t at = int64_t{state} * call.q_heads + head;
  store_scaled(partial.values, 1.0f, call.dim, call.state_out + at * call.dim);
  call.state_top[at] = partial.top;
  call.state_sum[at] = partial.sum;
}

// lse = log(sum_i exp(lse_i)), out = sum_i exp(lse_i - lse) out_i, over a row's states. Those of one
// row stand side by side and are taken in that order, whichever thread comes last.
template <class T>
void merge_row(const AttentionCall& call, int32_t row, int32_t kv_head) {
  const Merge merge = call.work.merges[row];
  alignas(64) float values[1024];
  for (int32_t head = kv_head * call.group; head < (kv_head + 1) * call.group; ++head) {
    const int64_t at = int64_t{merge.state} * call.q_heads + head;
    float top = -kInfinity, sum = 0.0f;
    for (int32_t i = 0; i < merge.count; ++i) {
      const float other = call.state_top[at + int64_t{i} * call.q_heads];
      top = top > other ? top : other;
    }
    for (int32_t d = 0; d < call.dim; ++d) values[d] = 0.0f;
    // Where all are empty, any finite stand-in for -inf gives weights of 0.
    const float safe = top == -kInfinity ? 0.0f : top;
    for (int32_t i = 0; i < merge.count; ++i) {
      const int64_t state = at + int64_t{i} * call.q_heads;
      float weight[kLanes];
      store(weight, exp2(all(call.state_top[state] - safe)));
      sum += weight[0] * call.state_sum[state];
      const float* part = call.state_out + state * call.dim;
      for (int32_t d = 0; d < call.dim; ++d) values[d] += weight[0] * part[d];
    }
    store_result<T>(call, int64_t{row} * call.q_heads + head, {values, top, sum});
  }
}

}  // namespace onestem::ONESTEM_ISA
