// Sampling: a token of each row of logits, by inverting its cumulative distribution.
#pragma once

#include "attention.h"

namespace onestem {

// Per row. Top-k, top-p and min-p each keep a leading part of the tokens in order of their logits
// (equal ones by id), as in `onestem/engine/sampler.py`.
struct DrawCall {
  const float* logits;  // [rows, count]
  int64_t count;
  int32_t bits;
  const double *temperature, *top_p, *min_p, *uniform;  // [rows]; uniform in (0, 1)
  const int64_t* top_k;                                 // [rows], `count` or more where off
  int64_t* ids;                                         // [rows]
};

void draw(const DrawCall& call, const Kernels& kernels, int64_t begin, int64_t end);

}  // namespace onestem
