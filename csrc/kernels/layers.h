// Elementwise parts of a step, fused: residual and RMSNorm, RoPE and the KV write, SiLU times up.
// Sums and functions in float32, one rounding at the end.
#pragma once

namespace onestem::ONESTEM_ISA {

inline float inverse_rms(float sum_of_squares, int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares / static_cast<float>(width) + eps);
}

// Rows of T, a weight of W.
template <class T, class W>
void add_rms_norm_of(const AddRmsNormCall& call, int64_t begin, int64_t end) {
  const W* weight = static_cast<const W*>(call.weight);
  for (int64_t row = begin; row < end; ++row) {
    T* hidden = static_cast<T*>(call.hidden) + row * call.width;
    const T* delta = static_cast<const T*>(call.delta) + row * call.width;
    T* out = static_cast<T*>(call.out) + row * call.width;
    vf squares = zeros();
    for_vectors(call.width, [&](int64_t d, int32_t n) {
      vf x = get(hidden + d, n);
      if (call.delta != nullptr) {
        put(hidden + d, x + get(delta + d, n), n);
        x = get(hidden + d, n);  // as rounded
      }
      squares = fma(x, x, squares);
    });
    const vf factor = all(inverse_rms(sum(squares), call.width, call.eps));
    for_vectors(call.width, [&](int64_t d, int32_t n) {
      put(out + d, get(hidden + d, n) * factor * get(weight + d, n), n);
    });
  }
}

template <class T>
void add_rms_norm(const AddRmsNormCall& call, int64_t begin, int64_t end) {
  call.wide_weight ? add_rms_norm_of<T, float>(call, begin, end)
                   : add_rms_norm_of<T, T>(call, begin, end);
}

template <class T>
float head_factor(const T* x, const RopeWriteCall& call) {
  vf squares = zeros();
  for_vectors(call.dim, [&](int64_t d, int32_t n) {
    const vf value = get(x + d, n);
    squares = fma(value, value, squares);
  });
  return inverse_rms(sum(squares), call.dim, call.eps);
}

// One head's RMSNorm (where it has a weight) and rotation: pair i is (x[i], x[i + dim / 2]).
template <class T, class W>
void rotate_head(const T* x, const W* norm, const RopeWriteCall& call, int64_t row, T* out) {
  const int32_t half = call.dim / 2;
  const float *cos = call.cos + row * half, *sin = call.sin + row * half;
  const float factor = norm == nullptr ? 1.0f : head_factor(x, call);
  for_vectors(half, [&](int64_t d, int32_t n) {
    vf low = get(x + d, n), high = get(x + half + d, n);
    if (norm != nullptr) {
      low = low * all(factor) * get(norm + d, n);
      high = high * all(factor) * get(norm + half + d, n);
    }
    const vf c = get(cos + d, n), s = get(sin + d, n);
    put(out + d, low * c - high * s, n);
    put(out + half + d, high * c + low * s, n);
  });
}

template <class T>
void write_value(const T* x, const RopeWriteCall& call, T* out) {
  if (!call.value_norm) {
    __builtin_memcpy(out, x, static_cast<size_t>(call.dim) * sizeof(T));
    return;
  }
  const vf factor = all(head_factor(x, call));
  for_vectors(call.dim, [&](int64_t d, int32_t n) { put(out + d, get(x + d, n) * factor, n); });
}

template <class T, class W>
void rope_write_of(const RopeWriteCall& call, int64_t begin, int64_t end) {
  const int64_t heads = int64_t{call.q_heads} + call.kv_heads + call.value_heads;
  const int64_t width = heads * call.dim;
  const PageStrides& pages = call.pages;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.qkv) + row * width;
    T* q = static_cast<T*>(call.q) + row * call.q_heads * call.dim;
    const int64_t page = call.slots[row] / call.page_size, place = call.slots[row] % call.page_size;
    const int64_t at = page * pages.page + place * pages.token;
    T* k = static_cast<T*>(call.k_pages) + at;
    T* v = static_cast<T*>(call.v_pages) + at;
    for (int32_t h = 0; h < call.q_heads; ++h, x += call.dim, q += call.dim) {
      rotate_head(x, static_cast<const W*>(call.q_norm), call, row, q);
    }
    const T* values = call.value_heads > 0 ? x + int64_t{call.kv_heads} * call.dim : x;
    for (int32_t h = 0; h < call.kv_heads; ++h, x += call.dim, k += pages.head) {
      rotate_head(x, static_cast<const W*>(call.k_norm), call, row, k);
    }
    for (int32_t h = 0; h < call.kv_heads; ++h, values += call.dim, v += pages.head) {
      write_value(values, call, v);
    }
  }
}

template <class T>
void rope_write(const RopeWriteCall& call, int64_t begin, int64_t end) {
  call.wide_weights ? rope_write_of<T, float>(call, begin, end)
                    : rope_write_of<T, T>(call, begin, end);
}

// x / (1 + e^-x); beyond 2^126 the quotient is 0 in any type.
inline vf silu(vf x) {
  return x / (all(1.0f) + exp2(min(x * all(-kLog2e), all(126.0f))));
}

template <class T>
void silu_mul(const SiluMulCall& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(call.gate_up) + 2 * row * call.width;
    const T* up = gate + call.width;
    T* out = static_cast<T*>(call.out) + row * call.width;
    for_vectors(call.width, [&](int64_t d, int32_t n) {
      put(out + d, silu(get(gate + d, n)) * get(up + d, n), n);
    });
  }
}

}  // namespace onestem::ONESTEM_ISA
