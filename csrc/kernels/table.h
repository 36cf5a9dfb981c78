// The table of an instruction set's functions. Includes the kernels: a translation unit names its
// instruction set (ONESTEM_ISA), includes its vectors, then this.
#pragma once

#include <type_traits>

#include "kernels/math.h"
#include "kernels/tiles.h"
#include "kernels/states.h"
#include "kernels/products_float.h"
#include "kernels/wide.h"
#include "kernels/few.h"
#include "kernels/thin.h"
#include "kernels/layers.h"
#include "kernels/delta.h"
#include "kernels/linear.h"
#include "kernels/sampling.h"

namespace onestem::ONESTEM_ISA {

template <class T, class Products, class FewProducts>
void attend_item(const AttentionCall& call, const Item& item, char* scratch) {
  const int32_t lanes = item.num_rows * call.group;
  if (!item.wide) return ThinItem<T>::attend(call, item, scratch);
  if (call.work.grid) {
    if constexpr (Products::kHasFew) {
      if (lanes <= FewItem<T, Products>::kMost) {
        return FewItem<T, Products>::attend(call, item, scratch);
      }
    }
  } else if (lanes <= kLanes) {
    return WideItem<T, FewProducts>::attend(call, item, scratch);
  }
  WideItem<T, Products>::attend(call, item, scratch);
}

template <class T, class Products, class FewProducts>
size_t wide_scratch(int32_t dim) {
  const size_t few = WideItem<T, FewProducts>::scratch_bytes(dim);
  size_t bytes = WideItem<T, Products>::scratch_bytes(dim);
  if (few > bytes) bytes = few;
  if constexpr (Products::kHasFew) {
    const size_t other = FewItem<T, Products>::scratch_bytes(dim);
    if (other > bytes) bytes = other;
  }
  return bytes;
}

// `FewProducts`: of wide items with at most one vector of lanes.
template <class T, class Products, class FewProducts = Products>
void fill(Kernels& kernels, Dtype dtype, Rates rates) {
  kernels.race = race;
  kernels.top_logit = top_logit;
  kernels.sum_of_exp = sum_of_exp;
  kernels.weigh = weigh;
  kernels.weight_before = weight_before;
  kernels.count_before = count_before;
  kernels.group_tops = group_tops;
  kernels.tokens_from = tokens_from;
  kernels.channels = any_type<LinearChannels<WordDots>>();
  kernels.groups[kFour] = any_type<LinearGroups<kFour, PairDots>>();
  kernels.groups[kTable] = any_type<LinearGroups<kTable, PairDots>>();
  kernels.groups[kEight] = any_type<LinearGroups<kEight, PairDots>>();
  KernelsOf& of = kernels.of[dtype];
  of.lanes = kLanes;
  of.grid_keys = Products::kGridKeys;
  of.wide_lanes = WideItem<T, Products>::max_lanes;
  of.wide_scratch = wide_scratch<T, Products, FewProducts>;
  of.thin_scratch = ThinItem<T>::scratch_bytes;
  of.rates = rates;
  if constexpr (std::is_same_v<Products, FewProducts>) of.rates.pack_few = rates.pack;
  of.attend = attend_item<T, Products, FewProducts>;
  of.merge = merge_row<T>;
  of.add_rms_norm = add_rms_norm<T>;
  of.rope_write = rope_write<T>;
  of.silu_mul = silu_mul<T>;
  of.causal_conv = causal_conv<T>;
  of.delta_scratch = DeltaRows<T>::scratch_bytes;
  of.delta_rule = DeltaRows<T>::run;
  of.gated_norm = gated_norm<T>;
}

}  // namespace onestem::ONESTEM_ISA
