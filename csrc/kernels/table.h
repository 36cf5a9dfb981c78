// The table of an instruction set's functions. Includes the kernels: a translation unit names its
// instruction set (ONESTEM_ISA), includes its vectors, then this.
#pragma once

#include "kernels/math.h"
#include "kernels/tiles.h"
#include "kernels/states.h"
#include "kernels/products_float.h"
#include "kernels/wide.h"
#include "kernels/thin.h"
#include "kernels/layers.h"
#include "kernels/draw.h"

namespace onestem::ONESTEM_ISA {

template <class T, class Products>
void attend_item(const AttentionCall& call, const Item& item, char* scratch) {
  if (item.wide) {
    WideItem<T, Products>::attend(call, item, scratch);
  } else {
    ThinItem<T>::attend(call, item, scratch);
  }
}

template <class T, class Products>
void fill(Kernels& kernels, Dtype dtype, Rates rates) {
  kernels.weigh_tokens = weigh_tokens;
  KernelsOf& of = kernels.of[dtype];
  of.lanes = kLanes;
  of.wide_lanes = WideItem<T, Products>::max_lanes;
  of.wide_scratch = WideItem<T, Products>::scratch_bytes;
  of.thin_scratch = ThinItem<T>::scratch_bytes;
  of.rates = rates;
  of.attend = attend_item<T, Products>;
  of.merge = merge_row<T>;
  of.add_rms_norm = add_rms_norm<T>;
  of.rope_write = rope_write<T>;
  of.silu_mul = silu_mul<T>;
}

}  // namespace onestem::ONESTEM_ISA
