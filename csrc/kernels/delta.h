// The gated delta rule over parts of a step, its convolution and its norm. A head's state S [dk][dv]
// is read once for a block of rows i = 0..n-1. With c_i the sum of their decays so far:
//
//   d_i = beta_i (v_i - e^c_i S^T k_i - sum over j < i of e^(c_i - c_j) (k_i k_j) d_j)
//   out_i = e^c_i S^T q_i + sum over j <= i of e^(c_i - c_j) (q_i k_j) d_j
//   S <- e^c_last S + sum of e^(c_last - c_i) k_i d_i^T
//
// What a block adds to the three products with S grows with its rows, so it has few.
#pragma once

namespace onestem::ONESTEM_ISA {

constexpr int32_t kBlockRows = 16;  // divides the chunks of onestem/ops/state_rows.py
constexpr int32_t kBlockVecs = kBlockRows / kLanes;
// Vectors of a state's row whose products with one k and one q are summed in registers.
constexpr int32_t kRowVecs = kThinSums / 2;
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

// out[i] = e^x[i] for x <= 0, of whole vectors.
inline void powers(const float* x, int32_t count, float* out) {
  for (int32_t i = 0; i < count; i += kLanes) {
    store(out + i, exp2(min(load(x + i), zeros()) * all(kLog2e)));
  }
}

// One part and one head of values.
template <class T>
class DeltaRows {
 public:
  static size_t scratch_bytes(const DeltaCall& call) {
    const int32_t rows = 3 * kBlockRows + (is_padded(call.dv) ? call.dk : 0);
    return sizeof(float) * (2 * kBlockRows * depth_of(call.dk) + kBlockRows * call.dk +
                            rows * width_of(call.dv) + 3 * kBlockRows * kBlockRows);
  }

  static void run(const DeltaCall& call, int64_t item, int64_t next, char* scratch) {
    DeltaRows rows(call, item, scratch);
    const Part& part = call.parts[next / call.heads];
    if (part.source >= 0) rows.fetch_later(rows.state_of(part.source, next % call.heads));
    rows.take_part();
  }

 private:
  static constexpr int32_t depth_of(int32_t dk) { return round_up(dk, kTileRows); }
  static constexpr int32_t width_of(int32_t dv) { return round_up(dv, kLanes); }
  static constexpr bool is_padded(int32_t dv) { return dv % kLanes != 0; }

  DeltaRows(const DeltaCall& call, int64_t item, char* scratch)
      : call_(call),
        part_(call.parts[item / call.heads]),
        head_(static_cast<int32_t>(item % call.heads)),
        key_head_(head_ / (call.heads / call.key_heads)),
        depth_(depth_of(call.dk)),
        width_(width_of(call.dv)) {
    left_ = reinterpret_cast<float*>(scratch);
    keys_ = left_ + 2 * kBlockRows * depth_;
    seen_ = keys_ + kBlockRows * call.dk;
    change_ = seen_ + 2 * kBlockRows * width_;
    grams_ = change_ + kBlockRows * width_;
    fades_ = grams_ + 2 * kBlockRows * kBlockRows;
    padded_ = fades_ + kBlockRows * kBlockRows;
  }

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
      const int32_t room = kBlockRows - (part_.position + done) % kBlockRows;
      const int32_t n = smaller(room, part_.count - done);
      const int64_t row = int64_t{part_.first} + done;
      n == 1 ? take_row(row, from, to) : take_block(row, n, from, to);
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

  void load_row(int64_t row, float* k, float* q) const {
    const int64_t at = int64_t{key_head_} * call_.dk;
    unit_row(static_cast<const T*>(call_.k) + row * call_.k_stride + at, call_.dk, 1.0f, k);
    unit_row(static_cast<const T*>(call_.q) + row * call_.q_stride + at, call_.dk,
             1.0f / __builtin_sqrtf(static_cast<float>(call_.dk)), q);
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

  // A single row. The state is read twice, the second time from a cache.
  void take_row(int64_t row, const float* from, float* to) {
    float *k = left_, *q = left_ + depth_;
    load_row(row, k, q);
    vf products = zeros();
    for_vectors(call_.dk, [&](int64_t d, int32_t n) {
      products = fma(get(k + d, n), get(q + d, n), products);
    });
    const int64_t at = row * call_.heads + head_;
    const vf score = all(sum(products)), beta = all(call_.beta[at]);
    const vf fade = exp2(all(smaller_of(call_.decay[at], 0.0f) * kLog2e));
    for_panels<kRowVecs>(width_ / kLanes, [&](int32_t v, auto vecs) {
      constexpr int32_t kVecs = decltype(vecs)::value;
      vf by_k[kVecs] = {}, by_q[kVecs] = {};
      const float* line = from + v * kLanes;
      for (int32_t s = 0; s < call_.dk; ++s, line += width_) {
        fetch_some();
        const vf some_k = all(k[s]), some_q = all(q[s]);
#pragma GCC unroll 8
        for (int32_t i = 0; i < kVecs; ++i) {
          const vf x = load(line + i * kLanes);
          by_k[i] = fma(some_k, x, by_k[i]);
          by_q[i] = fma(some_q, x, by_q[i]);
        }
      }
      vf change[kVecs];
#pragma GCC unroll 8
      for (int32_t i = 0; i < kVecs; ++i) {
        const int32_t d = (v + i) * kLanes, n = left(v + i);
        change[i] = beta * (get(values(row) + d, n) - fade * by_k[i]);
        put(out(row) + d, fma(score, change[i], fade * by_q[i]), n);
      }
      line = from + v * kLanes;
      float* after = to + v * kLanes;
      for (int32_t s = 0; s < call_.dk; ++s, line += width_, after += width_) {
        fetch_some();
        const vf some = all(k[s]);
#pragma GCC unroll 8
        for (int32_t i = 0; i < kVecs; ++i) {
          store(after + i * kLanes, fma(some, change[i], fade * load(line + i * kLanes)));
        }
      }
    });
  }

  static float smaller_of(float a, float b) { return a < b ? a : b; }

  void take_block(int64_t row, int32_t n, const float* from, float* to) {
    float sums[kBlockRows] = {}, fades[kBlockRows], rest[kBlockRows];
    load_block(row, n, sums);
    powers(sums, kBlockRows, fades);
    multiply_state(from, n);
    multiply_keys(n);
    for (int32_t i = 0; i < n; ++i) find_change(row, i, fades[i]);
    for (int32_t i = 0; i < kBlockRows; ++i) rest[i] = sums[n - 1] - sums[i];
    powers(rest, kBlockRows, rest);
    for (int32_t i = 0; i < n; ++i) {
      float* key = left_ + i * depth_;
      for (int32_t s = 0; s < call_.dk; ++s) key[s] *= rest[i];
    }
    add_changes(n, fades[n - 1], from, to);
  }

  // Rows of k, then of q, zeros for those that lack; k once more, a row for each of its elements; sums
  // of decays; and what is left of row j at row i.
  void load_block(int64_t row, int32_t n, float* sums) {
    for (int32_t half = 0; half < 2; ++half) {
      float* rest = left_ + (half * kBlockRows + n) * depth_;
      __builtin_memset(rest, 0, sizeof(float) * (kBlockRows - n) * depth_);
    }
    float total = 0.0f;
    for (int32_t i = 0; i < n; ++i) {
      load_row(row + i, left_ + i * depth_, left_ + (kBlockRows + i) * depth_);
      total += call_.decay[(row + i) * call_.heads + head_];
      sums[i] = total;
    }
    for (int32_t s = 0; s < call_.dk; ++s) {
      for (int32_t i = 0; i < kBlockRows; ++i) keys_[s * kBlockRows + i] = left_[i * depth_ + s];
    }
    for (int32_t i = 0; i < n; ++i) {
      float* line = fades_ + i * kBlockRows;
      for (int32_t j = 0; j < kBlockRows; ++j) line[j] = sums[i] - sums[j];
      powers(line, kBlockRows, line);
    }
  }

  // Calls visit(r) for the tiles' first rows that hold rows of k or of q.
  template <class Visit>
  __attribute__((always_inline)) inline void for_tiles(int32_t n, Visit visit) {
    for (int32_t half = 0; half < 2; ++half) {
      for (int32_t i = 0; i < n; i += kTileRows) visit(half * kBlockRows + i);
    }
  }

  // seen [k and q][dv] = rows times the state.
  void multiply_state(const float* state, int32_t n) {
    for_panels<kTileVecs>(width_ / kLanes, [&](int32_t v, auto vecs) {
      for_tiles(n, [&](int32_t r) {
        vf sums[kTileRows][decltype(vecs)::value] = {};
        product<MultiplyFloat>(left_ + r * depth_, depth_, 1, state + v * kLanes, call_.dk, sums,
                               width_);
        put_tile(sums, seen_ + r * width_ + v * kLanes, width_);
      });
    });
  }

  // grams [k and q][keys] = rows times keys.
  void multiply_keys(int32_t n) {
    for_tiles(n, [&](int32_t r) {
      vf sums[kTileRows][kBlockVecs] = {};
      product<MultiplyFloat>(left_ + r * depth_, depth_, 1, keys_, call_.dk, sums);
      put_tile(sums, grams_ + r * kBlockRows, kBlockRows);
    });
  }

  template <int ROWS, int VECS>
  static void put_tile(const vf (&sums)[ROWS][VECS], float* to, int32_t step) {
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < VECS; ++v) store(to + r * step + v * kLanes, sums[r][v]);
    }
  }

  // Row i's change, after those before it, and its result.
  void find_change(int64_t row, int32_t i, float fade) {
    float by_k[kBlockRows], by_q[kBlockRows];
    for (int32_t j = 0; j <= i; ++j) {
      const float left = fades_[i * kBlockRows + j];
      by_k[j] = left * grams_[i * kBlockRows + j];
      by_q[j] = left * grams_[(kBlockRows + i) * kBlockRows + j];
    }
    const vf beta = all(call_.beta[(row + i) * call_.heads + head_]);
    for (int32_t v = 0; v * kLanes < width_; ++v) {
      const int32_t d = v * kLanes, n = left(v);
      vf change = zeros(), sums = all(fade) * load(seen_ + (kBlockRows + i) * width_ + d);
      for (int32_t j = 0; j < i; ++j) {
        const vf other = load(change_ + j * width_ + d);
        change = fma(all(by_k[j]), other, change);
        sums = fma(all(by_q[j]), other, sums);
      }
      const vf value = get(values(row + i) + d, n);
      change = beta * (value - all(fade) * load(seen_ + i * width_ + d) - change);
      store(change_ + i * width_ + d, change);
      put(out(row + i) + d, fma(all(by_q[i]), change, sums), n);
    }
  }

  void add_changes(int32_t n, float fade, const float* from, float* to) {
    for_panels<kTileVecs>(width_ / kLanes, [&](int32_t v, auto vecs) {
      constexpr int32_t kVecs = decltype(vecs)::value;
      for (int32_t s = 0; s < call_.dk; s += kTileRows) {
        vf sums[kTileRows][kVecs] = {};
        product<MultiplyFloat>(left_ + s, 1, depth_, change_ + v * kLanes, n, sums, width_);
        const int32_t rows = smaller(kTileRows, call_.dk - s);
        for (int32_t r = 0; r < rows; ++r) {
          const int64_t at = int64_t{s + r} * width_ + v * kLanes;
#pragma GCC unroll 8
          for (int32_t i = 0; i < kVecs; ++i) {
            store(to + at + i * kLanes, fma(all(fade), load(from + at + i * kLanes), sums[r][i]));
          }
        }
      }
    });
  }

  const DeltaCall& call_;
  const Part& part_;
  int32_t head_, key_head_;
  int32_t depth_, width_;  // dk in rows of tiles, dv in vectors
  float *left_, *keys_, *seen_, *change_, *grams_, *fades_, *padded_;
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
