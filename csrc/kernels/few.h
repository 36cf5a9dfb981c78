// Wide items on the grid that have few lanes. A vector holds keys, and then elements of a head, where
// `WideItem` has one query row in each lane and leaves the others empty. Every score, weight and sum is
// added up in the same order as there: both give the same bits.
#pragma once

namespace onestem::ONESTEM_ISA {

template <class T, class Products>
class FewItem {
 public:
  static constexpr int32_t kMost = kLanes / 2;  // lanes; from there on the other is as fast

  static size_t scratch_bytes(int32_t dim) {
    FewItem item;
    Scratch scratch(nullptr);
    item.layout(scratch, dim);
    return scratch.used();
  }

  static void attend(const AttentionCall& call, const Item& item, char* memory) {
    FewItem few;
    Scratch scratch(memory);
    few.layout(scratch, call.dim);
    few.call_ = &call;
    few.item_ = &item;
    few.lanes_ = item.num_rows * call.group;
    few.special_ = is_special(call);
    for (int32_t h = 0; h < item.num_heads; ++h) few.attend_head(item.head + h);
  }

 private:
  using Element = typename Products::Element;
  using Multiply = typename Products::Multiplier;

  static constexpr int kVecs = 4;  // of keys or elements that are summed side by side
  static constexpr int kWidth = kVecs * kLanes;
  static constexpr int32_t kKeys = Products::kGridKeys, kSteps = kKeys / Products::kPack;

  void layout(Scratch& scratch, int32_t dim) {
    words_ = Products::query_rows(dim);
    width_ = round_up(dim, kWidth);
    queries_ = scratch.take<Element>(kMost * words_);
    scores_ = scratch.take<float>(kMost * kKeys);
    weights_ = scratch.take<Element>(kMost * kSteps);
    now_ = Sums(scratch, kMost, width_);
    before_ = Sums(scratch, kMost, width_);
    tiles_ = scratch.take<Tile>(2);
  }

  void attend_head(int32_t head) {
    head_ = head;
    k_ = static_cast<const T*>(call_->k) + head * call_->pages.head;
    v_ = static_cast<const T*>(call_->v) + head * call_->pages.head;
    for (int32_t lane = 0; lane < lanes_; ++lane) {
      const int64_t row = call_->work.rows[row_of(lane)];
      const T* q = static_cast<const T*>(call_->q) + (row * call_->q_heads + q_head(lane)) * call_->dim;
      Products::pack_query(q, call_->dim, queries_ + lane * words_);
    }
    clear();
    for (int32_t lane = 0; lane < lanes_; ++lane) go_on(lane);
    walk_tiles(*call_, *item_, kKeys, tiles_, bounds_, *this);
    for (int32_t lane = 0; lane < lanes_; ++lane) {
      float* out = now_.out + lane * width_;
      for_pairs(call_->dim, [&](int32_t d) { in_order<T>(out + d); });
      store_partial<T>(*call_, row_of(lane), q_head(lane), {out, now_.top[lane], now_.sum[lane]});
    }
  }

  int32_t row_of(int32_t lane) const { return item_->rows_at + lane / call_->group; }
  int32_t q_head(int32_t lane) const { return head_ * call_->group + lane % call_->group; }

  void go_on(int32_t lane) {
    const float* values = handed_state(*call_, *item_, row_of(lane), q_head(lane), now_.top[lane], now_.sum[lane]);
    if (values == nullptr) return;
    float* out = now_.out + lane * width_;
    __builtin_memcpy(out, values, static_cast<size_t>(call_->dim) * sizeof(float));
    for_pairs(call_->dim, [&](int32_t d) { out_of_order<T>(out + d); });
  }

  void clear() {
    for (int32_t i = 0; i < lanes_ * width_; ++i) now_.out[i] = 0.0f;
    for (int32_t lane = 0; lane < lanes_; ++lane) {
      now_.top[lane] = -kInfinity;
      now_.sum[lane] = 0.0f;
    }
  }

  template <class Walker>
  friend void walk_tiles(const AttentionCall&, const Item&, int32_t, Tile*, Bounds*, Walker&);

  void begin_piece() {}

  void begin_segment() {
    exchange(now_, before_);
    clear();
  }

  void fold_segment() {
    for (int32_t lane = 0; lane < lanes_; ++lane) {
      const Fold fold(all(before_.top[lane]), all(now_.top[lane]));
      now_.top[lane] = first_of(fold.top);
      now_.sum[lane] = first_of(fold(all(before_.sum[lane]), all(now_.sum[lane])));
      for (int32_t d = 0; d < width_; d += kLanes) {
        float* more = now_.out + lane * width_ + d;
        store(more, fold(load(before_.out + lane * width_ + d), load(more)));
      }
    }
  }

  void attend_tile(Tile& tile, const Tile* next) {
    const int32_t count = round_up(tile.count, larger(kLanes, Products::kKeyStep));
    for (int32_t i = tile.count; i < count; ++i) tile.offsets[i] = tile.offsets[tile.count - 1];
    Fetch fetch;
    if (next != nullptr) {
      fetch = Fetch(*next, k_, v_, sizeof(T), int64_t{call_->dim} * sizeof(T), lanes_ + lanes_ / 2);
    }
    score(tile, count);
    float rescale[kMost];
    for (int32_t lane = 0; lane < lanes_; ++lane) {
      if (special_) adjust(tile, lane, count);
      mask(tile, lane, count);
      rescale[lane] = weigh(lane, count);
      fetch();
    }
    for (int32_t lane = 0; lane < lanes_; lane += 2) {
      lane + 1 < lanes_ ? accumulate<2>(tile, lane, count, rescale)
                        : accumulate<1>(tile, lane, count, rescale);
      fetch();
    }
  }

  // Scores of all lanes.
  template <int LANES = 1>
  void score(const Tile& tile, int32_t count) {
    if constexpr (LANES < kMost) {
      if (LANES < lanes_) return score<LANES + 1>(tile, count);
    }
    constexpr int kSums = LANES <= 2 ? kVecs : LANES <= 4 ? 2 : 1;
    int32_t k = 0;
    for (; k + kSums * kLanes <= count; k += kSums * kLanes) score_at<LANES, kSums>(tile, k);
    for (; k < count; k += kLanes) score_at<LANES, 1>(tile, k);
  }

  // Of keys k to k + VECS * kLanes - 1, whose words are turned: a vector holds one of each.
  template <int LANES, int VECS>
  void score_at(const Tile& tile, int32_t k) {
    vf sums[LANES][VECS] = {};
    for (int32_t w = 0; w < call_->dim / Products::kPack; w += 4) {
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) {
        vf keys[4];
        const int64_t* offsets = tile.offsets + k + v * kLanes;
        transpose4([&](int i) { return Products::four_words(k_ + offsets[i], w); }, keys);
#pragma GCC unroll 8
        for (int l = 0; l < LANES; ++l) {
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            sums[l][v] = Multiply::add(queries_[l * words_ + w + j], keys[j], sums[l][v]);
          }
        }
      }
    }
    for (int l = 0; l < LANES; ++l) {
      for (int v = 0; v < VECS; ++v) store(scores_of(l) + k + v * kLanes, sums[l][v]);
    }
  }

  float* scores_of(int32_t lane) const { return scores_ + lane * kKeys; }

  // As `WideItem::adjust`.
  void adjust(const Tile& tile, int32_t lane, int32_t count) {
    float* scores = scores_of(lane);
    const vf softcap = all(call_->softcap);
    const float* slopes = call_->alibi_slopes;
    const vf slope = all(slopes == nullptr ? 0.0f : slopes[q_head(lane)]);
    const int32_t row = slopes == nullptr ? 0 : call_->work.row_position[call_->work.rows[row_of(lane)]];
    const vf position = all(static_cast<float>(row));
    for (int32_t k = 0; k < count; k += kLanes) {
      float positions[kLanes];
      for (int32_t i = 0; i < kLanes; ++i) positions[i] = static_cast<float>(tile.start + k + i);
      vf one = load(scores + k) * all(call_->scale);
      if (call_->softcap != 0.0f) one = softcap * tanh(one / softcap);
      store(scores + k, fma(slope, load(positions) - position, one));
    }
  }

  void mask(const Tile& tile, int32_t lane, int32_t count) {
    const Bounds& seen = bounds_[lane / call_->group];
    float* scores = scores_of(lane);
    const int32_t first = clamp(seen.first - tile.start, 0, count);
    for (int32_t k = 0; k < first; ++k) scores[k] = -kInfinity;
    for (int32_t k = clamp(seen.end - tile.start, 0, count); k < count; ++k) scores[k] = -kInfinity;
  }

  // Scores become weights; gives the factor of what was summed before.
  float weigh(int32_t lane, int32_t count) {
    float* scores = scores_of(lane);
    vf best = all(-kInfinity);
    for (int32_t k = 0; k < count; k += kLanes) best = max(best, load(scores + k));
    const vf scale = all(special_ ? kLog2e : call_->scale * kLog2e);
    const vf old = all(now_.top[lane]), now = max(old, all(top_of(best)) * scale);
    // Where nothing was seen yet, any finite stand-in for -inf makes all weights 0.
    const vf minus_top = zeros() - max(now, all(-3e38f));
    now_.top[lane] = first_of(now);
    Element* weights = weights_ + lane * kSteps;
    for (int32_t k = 0; k < count; k += kLanes) {
      const vf weight = Products::power(fma(load(scores + k), scale, minus_top));
      store(scores + k, weight);
      Products::store_weights(weights + k / Products::kPack, weight);
    }
    const vf rescale = exp2(old + minus_top);
    const vf sum = all(Products::sum_of(scores, count));
    now_.sum[lane] = first_of(fma(all(now_.sum[lane]), rescale, sum));
    return first_of(rescale);
  }

  template <int LANES>
  void accumulate(const Tile& tile, int32_t lane, int32_t count, const float* rescale) {
    int32_t d = 0;
    for (; d + kWidth <= call_->dim; d += kWidth) {
      accumulate_at<LANES, kVecs>(tile, lane, count, rescale, d, kLanes);
    }
    for (; d + 2 * kLanes <= call_->dim; d += 2 * kLanes) {
      accumulate_at<LANES, 2>(tile, lane, count, rescale, d, kLanes);
    }
    for (; d < call_->dim; d += kLanes) {
      accumulate_at<LANES, 1>(tile, lane, count, rescale, d, smaller(kLanes, call_->dim - d));
    }
  }

  // Elements d to d + VECS * kLanes - 1 of a head, pairs of vectors in the order of `load_pair`; of a
  // single one the first n.
  template <int LANES, int VECS>
  void accumulate_at(const Tile& tile, int32_t lane, int32_t count, const float* rescale, int32_t d,
                     int32_t n) {
    const Element* weights = weights_ + lane * kSteps;
    vf sums[LANES][VECS] = {};
    for (int32_t k = 0; k < count; k += Products::kPack, ++weights) {
      vf values[VECS];
      if constexpr (VECS == 1) values[0] = Products::values(v_ + d, tile.offsets + k, n);
      for (int v = 0; v + 1 < VECS; v += 2) {
        Products::value_pair(v_ + d + v * kLanes, tile.offsets + k, values[v], values[v + 1]);
      }
      for (int l = 0; l < LANES; ++l) {
        for (int v = 0; v < VECS; ++v) {
          sums[l][v] = Multiply::add(weights[l * kSteps], values[v], sums[l][v]);
        }
      }
    }
    for (int l = 0; l < LANES; ++l) {
      for (int v = 0; v < VECS; ++v) {
        float* at = now_.out + (lane + l) * width_ + d + v * kLanes;
        store(at, fma(load(at), all(rescale[lane + l]), sums[l][v]));
      }
    }
  }

  const AttentionCall* call_;
  const Item* item_;
  const T *k_, *v_;
  Element *queries_, *weights_;
  float* scores_;
  Sums now_, before_;  // of the segment, and of those before it
  Tile* tiles_;
  Bounds bounds_[kMost];
  int32_t words_ = 0, width_ = 0, lanes_ = 0, head_ = 0;
  bool special_ = false;
};

}  // namespace onestem::ONESTEM_ISA
