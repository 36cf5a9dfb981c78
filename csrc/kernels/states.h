// What an item leaves behind: a row's result, or one of its states, and the merge of those.
#pragma once

namespace onestem::ONESTEM_ISA {

// Hands out pieces of a buffer, each on a cache line; from null it only counts.
class Scratch {
 public:
  explicit Scratch(char* begin) : begin_(begin) {}
  template <class E>
  E* take(int64_t count) {
    char* at = begin_ == nullptr ? nullptr : begin_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(E) + 63) / 64 * 64;
    return reinterpret_cast<E*>(at);
  }
  size_t used() const { return used_; }

 private:
  char* begin_;
  size_t used_ = 0;
};

// Whether scores are more than a product times a scale.
inline bool is_special(const AttentionCall& call) {
  return call.alibi_slopes != nullptr || call.softcap != 0.0f || !(call.scale > 0.0f);
}

// The states of an item's lanes: sums of values, as the item lays them out, running maxima, and sums
// of weights.
struct Sums {
  float *out, *top, *sum;
  Sums() = default;
  Sums(Scratch& scratch, int32_t lanes, int32_t rows)
      : out(scratch.take<float>(int64_t{lanes} * rows)),
        top(scratch.take<float>(lanes)),
        sum(scratch.take<float>(lanes)) {}
};

inline void exchange(Sums& a, Sums& b) {
  const Sums first = a;
  a = b;
  b = first;
}

// The sum of a query head's row over one item. `values` [dim], not normalised.
struct Partial {
  const float* values;
  float top, sum;
};

inline float first_of(vf x) {
  float lanes[kLanes];
  store(lanes, x);
  return lanes[0];
}

// Write values * factor in T.
template <class T>
inline void store_scaled(const float* values, float factor, int32_t dim, T* to) {
  for_vectors(dim, [&](int64_t d, int32_t n) { put(to + d, get(values + d, n) * all(factor), n); });
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

// The state that an item goes on from, of a row's query head, or null where it is nothing yet. Its
// maximum and sum are set.
inline const float* handed_state(const AttentionCall& call, const Item& item, int32_t part, int32_t head,
                                 float& top, float& sum) {
  const int32_t state = item.hand == kGoesOn ? call.work.handed[call.work.rows[part]] : -1;
  if (state < 0) return nullptr;
  const int64_t at = int64_t{state} * call.q_heads + head;
  top = call.state_top[at];
  sum = call.state_sum[at];
  return call.state_out + at * call.dim;
}

// lse = log(sum_i exp(lse_i)), out = sum_i exp(lse_i - lse) out_i, over a row's states. Those of one
// row stand side by side and are folded in that order, whichever thread comes last.
template <class T>
void merge_row(const AttentionCall& call, int32_t row, int32_t kv_head) {
  const Merge merge = call.work.merges[row];
  alignas(64) float values[1024];
  for (int32_t head = kv_head * call.group; head < (kv_head + 1) * call.group; ++head) {
    const int64_t at = int64_t{merge.state} * call.q_heads + head;
    vf top = all(-kInfinity), sum = zeros();
    for (int32_t i = 0; i < merge.count; ++i) {
      const int64_t state = at + int64_t{i} * call.q_heads;
      const Fold fold(top, all(call.state_top[state]));
      top = fold.top;
      sum = fold(sum, all(call.state_sum[state]));
      const float* part = call.state_out + state * call.dim;
      for_vectors(call.dim, [&](int64_t d, int32_t n) {
        const vf so_far = i == 0 ? zeros() : load(values + d);
        store(values + d, fold(so_far, get(part + d, n)));
      });
    }
    store_result<T>(call, int64_t{row} * call.q_heads + head, {values, first_of(top), first_of(sum)});
  }
}

}  // namespace onestem::ONESTEM_ISA
