// Layers with a gated delta rule (onestem/ops/delta.py says what they compute): plain data.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onestem {

// A line of `StateRows.table`.
struct Part {
  int32_t first, count, position, source, target;
};

// The width of all models, and rows that are computed at once: they share weights and inputs.
constexpr int32_t kConvWidth = 4, kConvRows = 4;

// `wide_weight`: the weight is float32, whatever rows are.
struct ConvCall {
  const Part* parts;
  int64_t num_parts;
  const void* x;  // [rows, channels], rows `stride` elements apart
  int64_t stride;
  const void* weight;  // [width, channels]
  void* states;        // [slots, width - 1, channels]
  void* out;           // [rows, channels]
  int64_t channels;
  int32_t width;
  bool wide_weight;
};

struct DeltaCall {
  const Part* parts;
  int64_t num_parts;
  const void *q, *k, *v;  // [rows, heads of its kind, dk or dv]
  int64_t q_stride, k_stride, v_stride;
  const float *decay, *beta;  // [rows, heads]
  float* states;              // [slots, heads, dk, dv]
  void* out;                  // [rows, heads, dv]
  int32_t key_heads, heads, dk, dv;
};

struct GatedNormCall {
  const void *x, *z, *weight;  // [rows, heads * size] twice, [size]
  int64_t x_stride, z_stride;
  void* out;  // [rows, heads * size]
  int32_t heads, size;
  float eps;
  bool wide_weight;
};

}  // namespace onestem
