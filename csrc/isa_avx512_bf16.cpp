#define ONESTEM_ISA avx512_bf16
#define ONESTEM_VNNI
#include "kernels/vec_avx512.h"

#include "kernels/table.h"

#include "kernels/products_pairs.h"

#include "kernels/products_dot.h"

#include "kernels/linear_vnni.h"

namespace onestem {

namespace avx512 {
Kernels table();
}

namespace avx512_bf16 {

Kernels table() {
  Kernels kernels = avx512::table();
  fill<bf16, DotProducts>(kernels, kBfloat16, {0.08f, 0.027f, 0.05f, 0.01f, 1.4f});
  kernels.channels = any_type<LinearChannels<ByteDots>>();
  take_bytes(kernels);
  return kernels;
}

}  // namespace avx512_bf16
}  // namespace onestem
