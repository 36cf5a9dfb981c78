// Products of many rows with weights of 8 and 4 bits by tiles (AMX), 16 outputs and 16 rows, a panel, to
// a tile. Bytes of channels are the left operand, multiplied where they are. Values of groups become bf16
// in a buffer, and are the right operand: pairs of inputs of outputs side by side, as codes stand. Those
// of the next pair of blocks are made while tiles multiply the one before: other ports do that.
#pragma once

namespace onestem::ONESTEM_ISA {

constexpr int32_t kTileBytes = 1024;
// Inputs that a pass over the rows takes, as bytes of an output's row: a pair of blocks then lies in
// the first-level cache.
constexpr int32_t kPassBytes = 1024;
// Of rows, and of sums: a share of the second-level cache.
constexpr int64_t kRowsFit = 1 << 20, kSumsFit = 1 << 19;

inline int32_t num_panels(const LinearCall& call) {
  return static_cast<int32_t>((call.rows + 15) / 16);
}

// What the two ways share. `Way` has kSteps, tiles of a chunk; `Weights`, which `take` the tiles of a
// pair's next inputs, and in kSlices for a chunk make `some` of those that follow; `dot`; and `finish`.
template <class Way>
struct LinearAmx {
  static int64_t tiles(const PackedCodes& w) { return int64_t{w.chunks} * Way::kSteps; }
  static size_t panel_bytes(const PackedCodes& w) {
    return tiles(w) * kTileBytes + 2 * 16 * sizeof(float);
  }
  static char* panel_at(const LinearCall& call, int32_t panel) {
    return call.packed + panel * panel_bytes(call.weight);
  }
  // Behind the tiles: 16 scales, and 16 numbers that a zero of 1 takes off.
  static float* scales_of(const LinearCall& call, int32_t panel) {
    return reinterpret_cast<float*>(panel_at(call, panel) + tiles(call.weight) * kTileBytes);
  }

  // Rows that do not fit the cache are read once for several pairs.
  static int32_t pairs(const LinearCall& call) {
    const int64_t panels = num_panels(call);
    if (panels * static_cast<int64_t>(panel_bytes(call.weight)) <= kRowsFit) return 4;
    return larger(1, smaller(16, static_cast<int32_t>(kSumsFit / (panels * 2 * kTileBytes))));
  }
  static size_t sums_bytes(const LinearCall& call) {
    return size_t{2 * kTileBytes} * pairs(call) * (num_panels(call) + 1);
  }
  static size_t scratch_bytes(const LinearCall& call) {
    const size_t rows = tiles(call.weight) * kTileBytes, own = sums_bytes(call) + Way::buffer_bytes();
    return rows > own ? rows : own;
  }

  template <class T>
  static void multiply(const LinearCall& call, int32_t begin, int32_t end, char* scratch) {
    const PackedCodes& w = call.weight;
    const int32_t step = Way::kPassChunks, panels = num_panels(call);
    typename Way::Weights weights(w, begin, end, scratch + sums_bytes(call));
    // For each step of tiles, so that all are made by the last.
    const int32_t slices = (2 * Way::kSlices + (panels + 1) / 2 * Way::kSteps - 1) /
                           ((panels + 1) / 2 * Way::kSteps);
    static constexpr TileConfig config;
    _tile_loadconfig(&config);
    for (int32_t c = 0; c < w.chunks; c += step) {
      const int32_t count = smaller(step, w.chunks - c);
      for (int32_t pair = begin; pair < end; ++pair) {
        const char* tiles = weights.take(pair, c);
        char* sums = scratch + int64_t{pair - begin} * 2 * kTileBytes * (panels + 1);
        const int64_t block = Way::stride(w);
        const auto made = [&] {
          for (int32_t i = 0; i < slices; ++i) weights.some();
        };
        finish_stores();
        for (int32_t p = 0; p < panels; p += 2) {
          const char* rows = panel_at(call, p) + int64_t{c} * Way::kSteps * kTileBytes;
          char* to = sums + p * 2 * kTileBytes;
          const int32_t n = count * Way::kSteps;
          if (p + 1 < panels) {
            pass<2>(tiles, block, rows, panel_bytes(w), n, c == 0, to, made);
          } else {
            pass<1>(tiles, block, rows, 0, n, c == 0, to, made);
          }
        }
      }
    }
    _tile_release();
    // Row by row, so that few pages are written at a time.
    for (int32_t p = 0; p < panels; ++p) {
      for (int32_t pair = begin; pair < end; ++pair) {
        const char* sums = scratch + int64_t{pair - begin} * 2 * kTileBytes * (panels + 1);
        for (int32_t b = 0; b < 2; ++b) {
          const char* at = sums + (p / 2 * 4 + b * 2 + p % 2) * kTileBytes;
          Way::template finish<T>(call, 2 * pair + b, p, at);
        }
      }
    }
  }

 private:
  // Two blocks times one or two panels; `n` tiles deep. At each `beside` does what other ports can.
  template <int PANELS, class Beside>
  static void pass(const char* weights, int64_t block, const char* rows, int64_t panel, int32_t n,
                   bool first, char* sums, Beside beside) {
    if (first) {
      _tile_zero(0);
      _tile_zero(2);
      if constexpr (PANELS == 2) {
        _tile_zero(1);
        _tile_zero(3);
      }
    } else {
      _tile_loadd(0, sums, 64);
      _tile_loadd(2, sums + 2 * kTileBytes, 64);
      if constexpr (PANELS == 2) {
        _tile_loadd(1, sums + kTileBytes, 64);
        _tile_loadd(3, sums + 3 * kTileBytes, 64);
      }
    }
    for (int32_t i = 0; i < n; ++i, weights += kTileBytes, rows += kTileBytes) {
      _tile_loadd(4, weights, 64);
      _tile_loadd(6, rows, 64);
      Way::template dot<0>();
      if constexpr (PANELS == 2) {
        _tile_loadd(7, rows + panel, 64);
        Way::template dot<1>();
      }
      _tile_loadd(5, weights + block, 64);
      Way::template dot<2>();
      if constexpr (PANELS == 2) Way::template dot<3>();
      beside();
    }
    _tile_stored(0, sums, 64);
    _tile_stored(2, sums + 2 * kTileBytes, 64);
    if constexpr (PANELS == 2) {
      _tile_stored(1, sums + kTileBytes, 64);
      _tile_stored(3, sums + 3 * kTileBytes, 64);
    }
  }
};

// Sixteen rows of `words` 32-bit words, `stride` apart, as columns.
inline void pack_columns(const uint32_t* from, int64_t stride, int64_t words, char* to) {
  const float* in = reinterpret_cast<const float*>(from);
  float* out = reinterpret_cast<float*>(to);
  for (int64_t d = 0; d < words; d += 8) {
    transpose8(in + d, stride, out + d * 16, 16);
    transpose8(in + d + 8 * stride, stride, out + d * 16 + 8, 16);
  }
}

// Sums [16 rows][16 outputs], to the rows.
template <class T>
inline void store_rows(const LinearCall& call, int32_t block, int32_t panel, const float* sums,
                       bool scaled) {
  const int64_t first = int64_t{panel} * 16;
  const int64_t count = call.rows - first < 16 ? call.rows - first : 16;
  for (int64_t i = 0; i < count; ++i) {
    store_sixteen<T>(call, first + i, block * 16, sums + 16 * i, scaled);
  }
}

struct AmxChannels : LinearAmx<AmxChannels> {
  static constexpr int32_t kSteps = 1;
  static constexpr int32_t kPassChunks = kPassBytes / kCodeBytes;

  static constexpr int32_t kSlices = 0;

  struct Weights {
    const PackedCodes& w;
    Weights(const PackedCodes& w, int32_t, int32_t, char*) : w(w) {}
    const char* take(int32_t pair, int32_t chunk) {
      const uint8_t* at = w.codes + 2 * pair * block_bytes(w) + int64_t{chunk} * kTileBytes;
      return reinterpret_cast<const char*>(at);
    }
    void some() {}
  };

  static size_t buffer_bytes() { return 64; }
  static int64_t stride(const PackedCodes& w) { return block_bytes(w); }
  // Compilers want numbers of tiles to be written out.
  template <int SUMS>
  static void dot() {
    if constexpr (SUMS == 0) _tile_dpbusd(0, 4, 6);
    if constexpr (SUMS == 1) _tile_dpbusd(1, 4, 7);
    if constexpr (SUMS == 2) _tile_dpbusd(2, 5, 6);
    if constexpr (SUMS == 3) _tile_dpbusd(3, 5, 7);
  }

  template <class T>
  static void pack(const LinearCall& call, int64_t begin, int64_t end, char* scratch) {
    const int32_t depth = call.weight.depth;
    int8_t* codes = reinterpret_cast<int8_t*>(scratch);
    for (int64_t panel = begin; panel < end; ++panel) {
      float* scales = scales_of(call, static_cast<int32_t>(panel));
      int32_t* offsets = reinterpret_cast<int32_t*>(scales + 16);
      for (int64_t i = 0; i < 16; ++i) {
        int8_t* to = codes + i * depth;
        __builtin_memset(to, 0, static_cast<size_t>(depth));
        scales[i] = 1.0f;
        offsets[i] = 0;
        if (panel * 16 + i >= call.rows) continue;
        const T* x = static_cast<const T*>(call.x) + (panel * 16 + i) * call.in;
        scales[i] = scale_of(x, call.in, kLargest8);
        offsets[i] = 128 * round_codes_to(to, x, call.in, scales[i]);
      }
      pack_columns(reinterpret_cast<const uint32_t*>(codes), depth / 4, depth / 4,
                   panel_at(call, static_cast<int32_t>(panel)));
    }
  }

  template <class T>
  static void finish(const LinearCall& call, int32_t block, int32_t panel, const char* sums) {
    const float* scales = scales_of(call, panel);
    const vi offsets = load(reinterpret_cast<const int32_t*>(scales + 16));
    alignas(64) float scaled[16][16];
    for (int o = 0; o < 16; ++o) {
      const vi exact = subtract(load(reinterpret_cast<const int32_t*>(sums) + o * 16), offsets);
      store(scaled[o], to_float(exact) * load(scales));
    }
    alignas(64) float rows[16][16];
    for (int i = 0; i < 16; i += 8) {
      for (int j = 0; j < 16; j += 8) transpose8(&scaled[i][j], 16, &rows[j][i], 16);
    }
    store_rows<T>(call, block, panel, rows[0], true);
  }
};

// What stands in words from bit BIT on, as floats that are kOffset more: the highest bits of their
// fractions, so that what the offset is worth (`take_numbers`) is rounded by little.
constexpr float kOffset = 256.0f;
template <int MASK, int BIT>
inline vf number_at(vi words) {
  constexpr int kBit = 15;
  if constexpr (BIT < kBit) {
    words = _mm512_slli_epi32(words, kBit - BIT);
  } else {
    words = _mm512_srli_epi32(words, BIT - kBit);
  }
  const vi offset = float_bits(all(kOffset));
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(words, all(MASK << kBit), offset, 0xea));
}

// The nearest bfloat16s, side by side. Ties go away from zero in the first and towards it in the second,
// so that they do not add up. An instruction that converts would have all of the first before the second,
// and `round_to_bf16` takes twice as many. NaN stays one if it is quiet, its fraction not of ones alone.
inline vi bf16_pairs(vf first, vf second) {
  const vi low = _mm512_srli_epi32(add(float_bits(first), all(0x8000)), 16);
  const vi high = add(float_bits(second), all(0x7fff));
  return _mm512_ternarylogic_epi32(high, all(-65536), low, 0xea);
}

template <CodeKind KIND>
struct AmxGroups : LinearAmx<AmxGroups<KIND>> {
  using Shared = LinearAmx<AmxGroups<KIND>>;
  static constexpr int32_t kSteps = Codes<KIND>::kChunk / 32;
  static constexpr int32_t kPassChunks = kPassBytes / (kSteps * kCodeBytes);
  static constexpr int32_t kSlices = 4;

  static int64_t stride(const PackedCodes&) { return kPassChunks * kSteps * kTileBytes; }
  static size_t buffer_bytes() { return 4 * kPassChunks * kSteps * kTileBytes; }

  // Tiles of a pair of blocks, and the place in those that are made next.
  class Weights {
   public:
    Weights(const PackedCodes& w, int32_t begin, int32_t end, char* buffer)
        : w_(w), begin_(begin), end_(end), next_(buffer), other_(buffer + buffer_bytes() / 2) {
      groups_ = w.groups / w.chunks;
      shift_ = groups_ == 1 ? 2 : groups_ == 2 ? 1 : 0;
      start(begin, 0);
    }

    const char* take(int32_t pair, int32_t chunk) {
      while (block_ < 2) some();
      char* made = next_;
      next_ = other_;
      other_ = made;
      const bool last = pair + 1 == end_;
      start(last ? begin_ : pair + 1, last ? chunk + kPassChunks : chunk);
      return made;
    }

    // A quarter of a chunk of a block: four words of each output.
    __attribute__((noinline)) void some() {
      if (block_ == 2) return;
      if (quarter_ == 0) take_numbers();
      // Of each plane of 4 bits, or of all.
      vf of[kPlanes][2];
      for (int i = 0; i < kPlanes; ++i) {
        const Numbers& from = numbers_[(KIND == kEight ? quarter_ : i) >> shift_];
        for (int n = 0; n < 2; ++n) of[i][n] = load(from[n]);
      }
      char* const to = to_ + quarter_ * (KIND == kEight ? 8 : 4) * 64;
      const uint8_t* const codes = codes_;
      widen<0>(codes, of, to);
      widen<1>(codes, of, to);
      widen<2>(codes, of, to);
      widen<3>(codes, of, to);
      codes_ += 4 * kCodeBytes;
      if (++quarter_ < 4) return;
      quarter_ = 0;
      to_ += kSteps * kTileBytes;
      if (++chunk_ < begin_chunk_ + count_) return;
      ++block_;
      start_block();
    }

   private:
    static constexpr int kPlanes = KIND == kEight ? 1 : 4;
    // Of a group scales, and what values of -kOffset are worth.
    using Numbers = float[2][16];

    void start(int32_t pair, int32_t chunk) {
      pair_ = pair;
      begin_chunk_ = chunk;
      count_ = smaller(kPassChunks, w_.chunks - chunk);
      block_ = count_ > 0 ? 0 : 2;
      start_block();
    }

    void start_block() {
      chunk_ = begin_chunk_;
      codes_ = w_.codes + (2 * pair_ + block_) * block_bytes(w_) + int64_t{chunk_} * kTileBytes;
      to_ = next_ + block_ * stride(w_);
    }

    void take_numbers() {
      for (int32_t g = 0; g < groups_; ++g) {
        const Group group(w_, 2 * pair_ + block_, chunk_ * groups_ + g, 0);
        const vf least = fma(group.scale, all(-kOffset), group.least);
        const Mask odd = _mm512_cmp_ps_mask(least, least, _CMP_UNORD_Q);
        store(numbers_[g][0], _mm512_mask_mov_ps(group.scale, odd, zeros()));
        store(numbers_[g][1], _mm512_mask_mov_ps(least, odd, all(__builtin_nanf(""))));
      }
    }

    // A word of the quarter: of 8 bits two rows of a tile, of 4 bits one of each plane's.
    template <int WORD>
    __attribute__((always_inline)) void widen(const uint8_t* codes, const vf (&of)[kPlanes][2],
                                              char* to) const {
      codes += WORD * kCodeBytes;
      ask_for(codes);
      const vi words = load_bytes(codes);
      if constexpr (KIND == kEight) {
        widen_pair<0xff, 0, 8>(words, of[0], to + 2 * WORD * 64);
        widen_pair<0xff, 16, 24>(words, of[0], to + (2 * WORD + 1) * 64);
      } else if constexpr (KIND == kFour) {
        widen_pair<0xf, 0, 16>(words, of[0], to + WORD * 64);
        widen_pair<0xf, 4, 20>(words, of[1], to + (16 + WORD) * 64);
        widen_pair<0xf, 8, 24>(words, of[2], to + (32 + WORD) * 64);
        widen_pair<0xf, 12, 28>(words, of[3], to + (48 + WORD) * 64);
      } else {
        const vi low = bytes_of<KIND, 0>(w_, words), high = bytes_of<KIND, 1>(w_, words);
        widen_pair<0xff, 0, 16>(low, of[0], to + WORD * 64);
        widen_pair<0xff, 0, 16>(high, of[1], to + (16 + WORD) * 64);
        widen_pair<0xff, 8, 24>(low, of[2], to + (32 + WORD) * 64);
        widen_pair<0xff, 8, 24>(high, of[3], to + (48 + WORD) * 64);
      }
    }

    // A row of a tile: two inputs of sixteen outputs.
    template <int MASK, int FIRST, int SECOND>
    __attribute__((always_inline)) static void widen_pair(vi words, const vf (&by)[2], char* to) {
      const vf first = fma(number_at<MASK, FIRST>(words), by[0], by[1]);
      const vf second = fma(number_at<MASK, SECOND>(words), by[0], by[1]);
      _mm512_storeu_si512(to, bf16_pairs(first, second));
    }

    const PackedCodes& w_;
    int32_t begin_, end_;
    char *next_, *other_;
    int32_t groups_, shift_;  // of a chunk: one for 2^shift quarters
    int32_t pair_, begin_chunk_, count_;
    int32_t block_, chunk_, quarter_ = 0;
    const uint8_t* codes_;
    char* to_;
    alignas(64) Numbers numbers_[4];
  };

  // Compilers want numbers of tiles to be written out.
  template <int SUMS>
  static void dot() {
    if constexpr (SUMS == 0) _tile_dpbf16ps(0, 6, 4);
    if constexpr (SUMS == 1) _tile_dpbf16ps(1, 7, 4);
    if constexpr (SUMS == 2) _tile_dpbf16ps(2, 6, 5);
    if constexpr (SUMS == 3) _tile_dpbf16ps(3, 7, 5);
  }

  // Of bfloat16 rows, one input after the other.
  template <class T>
  static void pack(const LinearCall& call, int64_t begin, int64_t end, char*) {
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t row = panel * 16 + i, size = row < call.rows ? call.in : 0;
        const bf16* x = static_cast<const bf16*>(call.x) + row * call.in;
        char* to = Shared::panel_at(call, static_cast<int32_t>(panel)) + i * 64;
        for (int64_t d = 0; d < call.weight.depth; d += 32, to += kTileBytes) {
          if (d + 32 <= size) {
            __builtin_memcpy(to, x + d, 64);
          } else {
            __builtin_memset(to, 0, 64);
            if (d < size) __builtin_memcpy(to, x + d, static_cast<size_t>(size - d) * sizeof(bf16));
          }
        }
      }
    }
  }

  template <class T>
  static void finish(const LinearCall& call, int32_t block, int32_t panel, const char* sums) {
    store_rows<T>(call, block, panel, reinterpret_cast<const float*>(sums), false);
  }
};

// Of bfloat16 rows. To widen a weight takes as long as to multiply pairs of some six.
template <CodeKind KIND>
void take_tiles(Kernels& kernels) {
  kernels.groups[KIND].of[kBfloat16] = {path<LinearGroups<KIND, PairDots>>(1), path<AmxGroups<KIND>>(16), 6};
}

}  // namespace onestem::ONESTEM_ISA
