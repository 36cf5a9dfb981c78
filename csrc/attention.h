// What the parts of the extension tell each other: a plan, its work items, a call, and the table of
// functions that each instruction set fills. Plain data only: the kernels' translation units are
// compiled for different instruction sets and must not share inline code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "delta.h"
#include "linear.h"

namespace onestem {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

enum Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kNumDtypes = 3 };

// Columns of `AttentionPlan.runs` and `.spans`; docs/attention-plan.md says what they mean.
struct Run {
  int32_t page_start, offset, len, position;
};
struct Span {
  int32_t row, rows, run, first, end, step;
};

// Tokens lo..hi-1 of a run. The item's row j sees those with first <= t < end + j * step that its
// window holds.
struct Piece {
  int32_t run, lo, hi, first, end, step;
};

// Whether an item leaves the states of an unfinished segment for others, or goes on from such states.
enum Hand : int32_t { kKeeps, kLeaves, kGoesOn };

// Rows that attend to pieces, for KV heads head..head+num_heads-1. `wide`: all query rows of a KV
// head in one matrix product; otherwise each is a vector, and keys are read straight from the pages.
struct Item {
  int32_t rows_at, num_rows;
  int32_t pieces_at, num_pieces;
  int32_t head, num_heads;
  int32_t wide;
  Hand hand;
  float cost;  // nanoseconds, estimated
};

// A row whose `count` states stand from `state` on in the workspace; none where its only part has none.
struct Merge {
  int32_t state, count;
};

// The plan's arrays and its work items, for the kernels.
struct WorkView {
  int32_t page_size;
  const int32_t* run_pages;
  const Run* runs;
  const int32_t* row_position;
  int32_t window;  // 0: none
  bool grid;       // see `make_work`
  const Piece* pieces;
  const int32_t* rows;    // [parts]: queries of all items
  const int32_t* states;  // [parts]: where a row's state goes; -1: it is the row's only one
  const Merge* merges;    // [num_rows]
  const int32_t* handed;  // [num_rows]: the state that a row's item goes on from; -1: none
};

// Strides of KV pages [num_pages, page_size, kv_heads, dim], in elements; those of a head's vector are
// neighbours.
struct PageStrides {
  int64_t page, token, head;
};

// One attention call. A state in the workspace is not normalised: sum of exp2(score - top) * v, and
// `top` (a score times log2(e)) and `sum` beside it.
struct AttentionCall {
  WorkView work;
  const void *q, *k, *v;  // q [num_queries, q_heads, dim]; pages
  PageStrides pages;
  void* out;              // [num_rows, q_heads, dim]
  float* lse;             // [num_rows, q_heads]
  int32_t q_heads, kv_heads, group, dim;
  float scale;
  const float* alibi_slopes;  // [q_heads], or null
  float softcap;              // 0: none
  float* state_out;           // [num_states, q_heads, dim]
  float* state_top;           // [num_states, q_heads]
  float* state_sum;           // [num_states, q_heads]
};

// `wide_weight(s)`: weights of norms are float32, whatever rows are.
struct AddRmsNormCall {
  void* hidden;       // [rows, width], changed in place
  const void* delta;  // [rows, width], or null
  const void* weight;
  void* out;
  int64_t width;
  float eps;
  bool wide_weight;
};

struct RopeWriteCall {
  const void* qkv;  // [rows, (q_heads + kv_heads + value_heads) * dim]
  const void *q_norm, *k_norm;  // [dim], or null
  const float *cos, *sin;       // [rows, dim / 2]
  const int64_t* slots;         // [rows]
  void *q, *k_pages, *v_pages;
  int32_t q_heads, kv_heads, dim;
  int32_t value_heads;  // 0: values are keys, before norm and rotation
  float eps;
  int32_t page_size;
  PageStrides pages;
  bool wide_weights;
  bool value_norm;  // values are normed, without a weight
};

struct SiluMulCall {
  const void* gate_up;  // [rows, 2 * width]
  void* out;            // [rows, width]
  int64_t width;
};

// A race among the tokens of a row whose logit is at least `least` (`csrc/sampling.h`). Those that
// may be ahead of `bound` are handed to `consider`, which raises both.
struct RaceCall {
  const float* logits;
  int64_t count;
  uint32_t seed_low, seed_high, sequence, token;
  float heat;  // 1 / temperature
  const float *least, *bound;
  void (*consider)(void* context, int64_t id);
  void* context;
};
constexpr int32_t kLeadingGroups = 1024;

// What work costs, in nanoseconds of one core, for a KV head: reading a byte of K or V; multiplying
// one query head with one element in a thin item; converting an element for a wide one; multiplying
// one lane with one element there. `state`: one element of a state, written and merged. `pack_few`:
// as `pack`, for a wide item of at most `lanes` lanes; named where that has a form of its own.
struct Rates {
  float read, thin, pack, wide, state, pack_few = 0;
};

// What one instruction set offers for one type. Functions over rows work on rows begin..end-1.
struct KernelsOf {
  int32_t lanes;  // query rows of a wide item are padded to a multiple of this
  int32_t grid_keys;  // tokens of a tile on the grid
  Rates rates;
  int32_t (*wide_lanes)(int32_t dim);  // query rows (times group) of a wide item at most
  size_t (*wide_scratch)(int32_t dim);
  size_t (*thin_scratch)(int32_t dim, int32_t kv_heads);
  void (*attend)(const AttentionCall&, const Item&, char* scratch);
  void (*merge)(const AttentionCall&, int32_t row, int32_t kv_head);
  void (*add_rms_norm)(const AddRmsNormCall&, int64_t begin, int64_t end);
  void (*rope_write)(const RopeWriteCall&, int64_t begin, int64_t end);
  void (*silu_mul)(const SiluMulCall&, int64_t begin, int64_t end);
  void (*causal_conv)(const ConvCall&, int64_t begin, int64_t end, char* scratch);  // of channels
  size_t (*delta_scratch)(const DeltaCall&);
  // Items part * heads + head: this one, and the thread's next, which may be this one too.
  void (*delta_rule)(const DeltaCall&, int64_t item, int64_t next, char* scratch);
  void (*gated_norm)(const GatedNormCall&, int64_t begin, int64_t end);
};

struct Kernels {
  KernelsOf of[kNumDtypes];
  LinearKernels channels, groups[kNumCodeKinds];
  bool (*race)(const RaceCall&);
  float (*top_logit)(const float* logits, int64_t count);
  double (*sum_of_exp)(const float* logits, int64_t count, float top);
  int64_t (*weigh)(const float* logits, int64_t count, float top, float heat, int32_t* weights);
  int64_t (*weight_before)(const float* logits, const int32_t* weights, int64_t count, float logit,
                           int64_t id);
  int64_t (*count_before)(const float* logits, int64_t count, float logit, int64_t id);
  void (*group_tops)(const float* logits, int64_t count, float* tops);
  int64_t (*tokens_from)(const float* logits, int64_t count, float least, int64_t room,
                         int32_t* ids);
};

// Positions of the segment that a position is in (see `make_work`). First ones are shorter: rows share
// whole segments, and short prompts would have none.
constexpr int32_t segment_size(int32_t position) { return position < 512 ? 128 : 256; }
constexpr int32_t segment_start(int32_t position) {
  return position / segment_size(position) * segment_size(position);
}

// Query heads that a thin item multiplies at most with a KV head.
constexpr int32_t kThinLanes = 8;

}  // namespace onestem
