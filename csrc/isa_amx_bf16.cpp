#define ONESTEM_ISA amx_bf16
#define ONESTEM_VNNI
#include "kernels/vec_avx512.h"

#include "kernels/table.h"

#include "kernels/products_pairs.h"

#include "kernels/products_amx.h"

#include "kernels/products_amx_few.h"

#include "kernels/linear_vnni.h"

#include "kernels/linear_amx.h"

namespace onestem {

namespace avx512 {
Kernels table();
}

namespace amx_bf16 {

Kernels table() {
  Kernels kernels = avx512::table();
  fill<bf16, AmxProducts, AmxFewProducts>(kernels, kBfloat16,
                                          {0.06f, 0.035f, 0.06f, 0.004f, 3.0f, 0.1f});
  constexpr LinearWays channels = {path<LinearChannels<ByteDots>>(1), path<AmxChannels>(16), 1};
  kernels.channels = {{channels, channels, channels}};
  take_bytes(kernels);
  take_tiles<kFour>(kernels);
  take_tiles<kTable>(kernels);
  take_tiles<kEight>(kernels);
  return kernels;
}

}  // namespace amx_bf16
}  // namespace onestem
