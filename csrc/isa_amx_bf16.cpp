#define ONESTEM_ISA amx_bf16
#include "kernels/vec_avx512.h"

#include "kernels/table.h"

#include "kernels/products_pairs.h"

#include "kernels/products_amx.h"

#include "kernels/products_amx_few.h"

namespace onestem {

namespace avx512 {
Kernels table();
}

namespace amx_bf16 {

Kernels table() {
  Kernels kernels = avx512::table();
  fill<bf16, AmxProducts, AmxFewProducts>(kernels, kBfloat16,
                                          {0.06f, 0.035f, 0.15f, 0.005f, 0.4f, 0.1f});
  return kernels;
}

}  // namespace amx_bf16
}  // namespace onestem
