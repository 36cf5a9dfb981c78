// The gated delta rule over parts of a step, its convolution and its norm. A row's bits depend on its
// inputs and the state before it alone, wherever parts begin and end: rows are taken one by one,
//
//   change = beta (v - e^g S^T k);  out = e^g S^T q + (k q) change;  S <- e^g S + k change^T
//
// and a column of S does not wait for others. So some columns take many rows while they stay in the
// nearest cache. What is written for one row is summed for the next at once.
#pragma once

namespace onestem::ONESTEM_ISA {

constexpr int32_t kBlockRows = 16;  // whose q and k are ready at once
// Vectors of a state's row whose products with one k and one q are summed in registers, and those of
// them that stay in a cache for many rows.
constexpr int32_t kRowVecs = kThinSums / 2, kCachedVecs = kRowVecs / 2;
constexpr int32_t kLine = 64 / sizeof(float);
constexpr float kUnitEps = 1e-6f;  // NORM_EPS of delta.py

template <int N>
struct Count {
  static constexpr int value = N;
};

// visit(v, Count<n>): vectors v..v+n-1 of `vecs`, MOST at a time, then what is left one by one.
template <int MOST, class Visit>
__attribute__((always_inline)) inline void for_panels(int32_t vecs, Visit visit) {
  int32_t v = 0;
  for (; v + MOST <= vecs; v += MOST) visit(v, Count<MOST>{});
  for (; v < vecs; ++v) visit(v, Count<1>{});
}

// A head of T as floats of length `factor`.
template <class T>
inline void unit_row(const T* x, int32_t size, float factor, float* out) {
  vf squares = zeros();
  for_vectors(size, [&](int64_t d, int32_t n) {
    const vf value = get(x + d, n);
    squares = fma(value, value, squares);
  });
  const vf scale = all(factor / __builtin_sqrtf(sum(squares) + kUnitEps));
  for_vectors(size, [&](int64_t d, int32_t n) { put(out + d, get(x + d, n) * scale, n); });
}

// One part and one head of values.
template <class T>
class DeltaRows {
 public:
  static size_t scratch_bytes(const DeltaCall& call) {
    const int32_t state = is_padded(call.dv) ? call.dk * width_of(call.dv) : 0;
    return sizeof(float) * (2 * kBlockRows * call.dk + state);
  }

  static void run(const DeltaCall& call, int64_t item, int64_t next, char* scratch) {
    DeltaRows rows(call, item, scratch);
    const Part& part = call.parts[next / call.heads];
    if (part.source >= 0) rows.fetch_later(rows.state_of(part.source, next % call.heads));
    rows.take_part();
  }

 private:
  static constexpr int32_t width_of(int32_t dv) { return round_up(dv, kLanes); }
  static constexpr bool is_padded(int32_t dv) { return dv % kLanes != 0; }

  DeltaRows(const DeltaCall& call, int64_t item, char* scratch)
      : call_(call),
        part_(call.parts[item / call.heads]),
        head_(static_cast<int32_t>(item % call.heads)),
        key_head_(head_ / (call.heads / call.key_heads)),
        width_(width_of(call.dv)),
        k_(reinterpret_cast<float*>(scratch)),
        q_(k_ + kBlockRows * call.dk),
        padded_(q_ + kBlockRows * call.dk) {}

  float* state_of(int32_t slot, int64_t head) const {
    return call_.states + (int64_t{slot} * call_.heads + head) * call_.dk * call_.dv;
  }

  void take_part() {
    float* target = state_of(part_.target, head_);
    const float* from = part_.source < 0 ? target : state_of(part_.source, head_);
    const size_t bytes = static_cast<size_t>(call_.dk) * call_.dv * sizeof(float);
    if (part_.source < 0) __builtin_memset(target, 0, bytes);
    float* to = target;
    if (is_padded(call_.dv)) {
      copy_rows(from, call_.dv, padded_, width_);
      from = to = padded_;
    }
    for (int32_t done = 0; done < part_.count;) {
      const int32_t n = smaller(kBlockRows, part_.count - done);
      load_rows(int64_t{part_.first} + done, n);
      part_.count == 1 ? take_rows<kRowVecs>(n, from, to) : take_rows<kCachedVecs>(n, from, to);
      from = to;
      done += n;
    }
    if (is_padded(call_.dv)) copy_rows(padded_, width_, target, call_.dv);
  }

  void copy_rows(const float* from, int32_t from_step, float* to, int32_t to_step) const {
    for (int32_t s = 0; s < call_.dk; ++s) {
      const float* row = from + int64_t{s} * from_step;
      float* out = to + int64_t{s} * to_step;
      for_vectors(call_.dv, [&](int64_t d, int32_t n) { put(out + d, get(row + d, n), n); });
    }
  }

  // n rows of k and q, what they are multiplied with, and their decays.
  void load_rows(int64_t row, int32_t n) {
    row_ = row;
    const int64_t head = int64_t{key_head_} * call_.dk;
    const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(call_.dk));
    for (int32_t r = 0; r < n; ++r) {
      float *k = k_ + r * call_.dk, *q = q_ + r * call_.dk;
      unit_row(static_cast<const T*>(call_.k) + (row + r) * call_.k_stride + head, call_.dk, 1.0f, k);
      unit_row(static_cast<const T*>(call_.q) + (row + r) * call_.q_stride + head, call_.dk, factor, q);
      vf products = zeros();
      for_vectors(call_.dk, [&](int64_t d, int32_t some) {
        products = fma(get(k + d, some), get(q + d, some), products);
      });
      scores_[r] = sum(products);
      const int64_t at = (row + r) * call_.heads + head_;
      strengths_[r] = call_.beta[at];
      logs_[r] = call_.decay[at] < 0.0f ? call_.decay[at] * kLog2e : 0.0f;
    }
  }
  const T* values(int64_t row) const {
    return static_cast<const T*>(call_.v) + row * call_.v_stride + int64_t{head_} * call_.dv;
  }
  T* out(int64_t row) const {
    return static_cast<T*>(call_.out) + (row * call_.heads + head_) * call_.dv;
  }
  // Elements that `call.dv` has from vector v on, at most a vector.
  int32_t left(int32_t v) const { return smaller(kLanes, call_.dv - v * kLanes); }

  // Asks for a state while another one is taken through the registers twice: so memory never waits.
  void fetch_later(const float* state) {
    ahead_ = state;
    lines_ = call_.dk * call_.dv / kLine;
    const int32_t panels = (width_ / kLanes + kRowVecs - 1) / kRowVecs;
    each_ = lines_ / (2 * panels * call_.dk) + 1;
  }
  void fetch_some() {
    for (int32_t i = smaller(each_, lines_); i > 0; --i, --lines_, ahead_ += kLine) {
      __builtin_prefetch(ahead_, 0, 3);
    }
  }

  template <int VECS>
  void take_rows(int32_t n, const float* from, float* to) {
    for_panels<VECS>(width_ / kLanes, [&](int32_t v, auto vecs) {
      take_panel<decltype(vecs)::value>(v, n, from + v * kLanes, to + v * kLanes);
    });
  }

  // n rows of columns v * kLanes.. of the state: n + 1 times through it, all but the first from a cache.
  template <int VECS>
  void take_panel(int32_t v, int32_t n, const float* from, float* to) {
    vf by_k[VECS] = {}, by_q[VECS] = {};
    const auto add = [&](const float* k, const float* q, int32_t s, int32_t i, vf x) {
      by_k[i] = fma(all(k[s]), x, by_k[i]);
      by_q[i] = fma(all(q[s]), x, by_q[i]);
    };
    const float* line = from;
    for (int32_t s = 0; s < call_.dk; ++s, line += width_) {
      fetch_some();
#pragma GCC unroll 8
      for (int32_t i = 0; i < VECS; ++i) add(k_, q_, s, i, load(line + i * kLanes));
    }
    for (int32_t r = 0; r < n; ++r, from = to) {
      const float *k = k_ + r * call_.dk, *next_k = k + call_.dk, *next_q = q_ + (r + 1) * call_.dk;
      const vf score = all(scores_[r]), beta = all(strengths_[r]), fade = exp2(all(logs_[r]));
      const vf minus = zeros() - fade;
      vf change[VECS];
#pragma GCC unroll 8
      for (int32_t i = 0; i < VECS; ++i) {
        const int32_t d = (v + i) * kLanes, some = left(v + i);
        change[i] = beta * fma(minus, by_k[i], get(values(row_ + r) + d, some));
        put(out(row_ + r) + d, fma(score, change[i], fade * by_q[i]), some);
        by_k[i] = by_q[i] = zeros();
      }
      const auto update = [&](auto visit) {
        const float* line = from;
        float* after = to;
        for (int32_t s = 0; s < call_.dk; ++s, line += width_, after += width_) {
          const vf some = all(k[s]);
#pragma GCC unroll 8
          for (int32_t i = 0; i < VECS; ++i) {
            const vf x = fma(some, change[i], fade * load(line + i * kLanes));
            store(after + i * kLanes, x);
            visit(s, i, x);
          }
        }
      };
      if (r + 1 < n) {
        update([&](int32_t s, int32_t i, vf x) { add(next_k, next_q, s, i, x); });
      } else {
        update([&](int32_t, int32_t i, vf) { if (i == 0) fetch_some(); });
      }
    }
  }

  const DeltaCall& call_;
  const Part& part_;
  int32_t head_, key_head_;
  int32_t width_;  // dv in whole vectors
  float *k_, *q_, *padded_;
  float scores_[kBlockRows], strengths_[kBlockRows], logs_[kBlockRows];
  int64_t row_ = 0;
  const float* ahead_ = nullptr;  // what is not asked for yet of the thread's next state
  int32_t lines_ = 0, each_ = 0;
};

// ROWS rows from `out` on, of channels 0..count-1: row r from taps r..r+WIDTH-1.
template <int WIDTH, int ROWS, class T, class W>
void convolve_rows(const T* const* taps, const W* weight, int64_t channels, int64_t count, T* out) {
  for_vectors(count, [&](int64_t d, int32_t n) {
    vf factors[WIDTH], inputs[WIDTH - 1 + ROWS];
    for (int i = 0; i < WIDTH; ++i) factors[i] = get(weight + i * channels + d, n);
    for (int i = 0; i < WIDTH - 1 + ROWS; ++i) inputs[i] = get(taps[i] + d, n);
    for (int r = 0; r < ROWS; ++r) {
      vf total = zeros();
      for (int i = 0; i < WIDTH; ++i) total = fma(factors[i], inputs[r + i], total);
      put(out + r * channels + d, silu(total), n);
    }
  });
}

template <class T, class W>
void convolve_row(const T* const* taps, const W* weight, const ConvCall& call, int64_t count, T* out) {
  for_vectors(count, [&](int64_t d, int32_t n) {
    vf total = zeros();
    for (int32_t i = 0; i < call.width; ++i) {
      total = fma(get(weight + i * call.channels + d, n), get(taps[i] + d, n), total);
    }
    put(out + d, silu(total), n);
  });
}

// Channels begin..end-1 of all parts.
template <class T, class W>
void causal_conv_of(const ConvCall& call, int64_t begin, int64_t end, char* scratch) {
  const int32_t keep = call.width - 1;
  const int64_t channels = call.channels, count = end - begin;
  const W* weight = static_cast<const W*>(call.weight) + begin;
  const T** taps = reinterpret_cast<const T**>(scratch);
  T* none = reinterpret_cast<T*>(taps + keep + kConvRows);
  __builtin_memset(none, 0, static_cast<size_t>(count) * sizeof(T));
  for (int64_t p = 0; p < call.num_parts; ++p) {
    const Part& part = call.parts[p];
    if (part.count == 0) continue;
    const T* x = static_cast<const T*>(call.x) + part.first * call.stride + begin;
    T* states = static_cast<T*>(call.states) + begin;
    const T* before = states + int64_t{part.source} * keep * channels;
    const auto input = [&](int64_t row) -> const T* {
      if (row >= 0) return x + row * call.stride;
      return part.source < 0 ? none : before + (keep + row) * channels;
    };
    for (int64_t row = 0, rows; row < part.count; row += rows) {
      rows = call.width == kConvWidth && part.count - row >= kConvRows ? kConvRows : 1;
      T* out = static_cast<T*>(call.out) + (part.first + row) * channels + begin;
      for (int64_t i = 0; i < keep + rows; ++i) taps[i] = input(row - keep + i);
      if (rows == kConvRows) {
        convolve_rows<kConvWidth, kConvRows>(taps, weight, channels, count, out);
      } else if (call.width == kConvWidth) {
        convolve_rows<kConvWidth, 1>(taps, weight, channels, count, out);
      } else {
        convolve_row(taps, weight, call, count, out);
      }
    }
    // In this order none is overwritten that is still to be read where source and target are one.
    T* after = states + int64_t{part.target} * keep * channels;
    for (int64_t i = 0; i < keep; ++i) {
      __builtin_memmove(after + i * channels, input(part.count - keep + i),
                        static_cast<size_t>(count) * sizeof(T));
    }
  }
}

template <class T>
void causal_conv(const ConvCall& call, int64_t begin, int64_t end, char* scratch) {
  call.wide_weight ? causal_conv_of<T, float>(call, begin, end, scratch)
                   : causal_conv_of<T, T>(call, begin, end, scratch);
}

template <class T, class W>
void gated_norm_of(const GatedNormCall& call, int64_t begin, int64_t end) {
  const W* weight = static_cast<const W*>(call.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    const T* z = static_cast<const T*>(call.z) + row * call.z_stride;
    T* out = static_cast<T*>(call.out) + row * call.heads * call.size;
    for (int32_t h = 0; h < call.heads; ++h, x += call.size, z += call.size, out += call.size) {
      vf squares = zeros();
      for_vectors(call.size, [&](int64_t d, int32_t n) {
        const vf value = get(x + d, n);
        squares = fma(value, value, squares);
      });
      const vf factor = all(inverse_rms(sum(squares), call.size, call.eps));
      for_vectors(call.size, [&](int64_t d, int32_t n) {
        put(out + d, get(x + d, n) * factor * get(weight + d, n) * silu(get(z + d, n)), n);
      });
    }
  }
}

template <class T>
void gated_norm(const GatedNormCall& call, int64_t begin, int64_t end) {
  call.wide_weight ? gated_norm_of<T, float>(call, begin, end)
                   : gated_norm_of<T, T>(call, begin, end);
}

}  // namespace onestem::ONESTEM_ISA
