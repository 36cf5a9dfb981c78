// Sampling on rows of logits: an exponential race (docs/sampling.md defines it),
// log-sums, leading tokens, ranks and penalties.
#pragma once

#include "attention.h"

namespace onestem {

// The words of `onestem.ops.sampling.rows.ROW`.
struct SamplingRow {
  uint32_t seed_low, seed_high, sequence, token;
  float temperature;
  int32_t top_k;  // 0: off
  float top_p, min_p;
  float repetition, presence, frequency;
  int32_t penalty;
  int32_t told, min_tokens, biased, spare;  // nothing to the kernels
};
static_assert(sizeof(SamplingRow) == 64);

enum Status : int32_t { kOk = 0, kNotFinite = 1, kMasked = 2 };

struct DrawCall {
  const float* logits;  // [rows, count]
  int64_t count;
  const SamplingRow* rows;
  uint32_t steps;  // added to each row's `token`
  int64_t* ids;
  int32_t* status;
};

void draw_tokens(const DrawCall& call, const Kernels& kernels, int64_t begin, int64_t end);

// Of rows index[begin..end-1]: natural log of the sum of exponentials.
struct LogSumCall {
  const float* logits;
  int64_t count;
  const int64_t* index;
  double* sums;
};
void log_sums(const LogSumCall& call, const Kernels& kernels, int64_t begin, int64_t end);

// The `most` leading tokens of rows: higher logits first, equal ones by id.
struct LeadingCall {
  const float* logits;
  int64_t count;
  const int64_t* index;
  int64_t most;
  float* values;  // [rows, most]
  int64_t* ids;
};
void leading_tokens(const LeadingCall& call, const Kernels& kernels, int64_t begin, int64_t end);

// How many tokens have a higher logit than a given one, or the same and a lower id.
struct RankCall {
  const float* logits;
  int64_t count;
  const int64_t *index, *ids;
  int64_t* ranks;
};
void token_ranks(const RankCall& call, const Kernels& kernels, int64_t begin, int64_t end);

}  // namespace onestem
