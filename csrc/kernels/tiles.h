// Which tokens an item reads, tile by tile, and which of its rows see them.
#pragma once

namespace onestem::ONESTEM_ISA {

constexpr int32_t kMaxTile = 256;

// Tokens at consecutive positions start..start+count-1, and where their keys stand in the pages
// (elements, without the head). They are of `piece`; on the grid, of any up to it.
struct Tile {
  const Piece* piece;
  int32_t start, count;
  int64_t offsets[kMaxTile];
};

inline int32_t position_of(const WorkView& work, const Piece& piece, int32_t token) {
  return work.runs[piece.run].position + token;
}

// Walks an item's pieces in tiles of `size` tokens. On the grid a tile begins at a multiple of that, or
// of a smaller segment, and goes on from piece to piece: no row sees places before its first token.
class TileWalk {
 public:
  TileWalk(const AttentionCall& call, const Item& item, int32_t size)
      : work_(call.work),
        piece_(call.work.pieces + item.pieces_at),
        last_(piece_ + item.num_pieces),
        size_(size),
        strides_(call.pages) {
    if (piece_ != last_) at_ = piece_->lo;
  }

  // The next tile, or false at the end.
  bool next(Tile& tile) {
    while (piece_ != last_ && at_ >= piece_->hi) {
      if (++piece_ != last_) at_ = piece_->lo;
    }
    if (piece_ == last_) return false;
    tile.piece = work_.grid ? last_ - 1 : piece_;
    const int32_t position = position_of(work_, *piece_, at_);
    const int32_t size = work_.grid ? smaller(size_, segment_size(position)) : size_;
    const int32_t before = work_.grid ? position % size : 0;
    tile.start = position - before;
    tile.count = before;
    do {
      const int32_t count = smaller(size - tile.count, piece_->hi - at_);
      find(tile.offsets + tile.count, count);
      tile.count += count;
      at_ += count;
      if (at_ == piece_->hi && ++piece_ != last_) at_ = piece_->lo;
    } while (work_.grid && piece_ != last_ && tile.count < size);
    for (int32_t i = 0; i < before; ++i) tile.offsets[i] = tile.offsets[before];
    return true;
  }

 private:
  void find(int64_t* offsets, int32_t count) const {
    const Run& run = work_.runs[piece_->run];
    const int64_t index = int64_t{run.offset} + at_;
    const int32_t* page = work_.run_pages + run.page_start + index / work_.page_size;
    int32_t place = static_cast<int32_t>(index % work_.page_size);
    for (int32_t i = 0; i < count; ++page, place = 0) {
      const int32_t stop = smaller(count, i + work_.page_size - place);
      int64_t offset = *page * strides_.page + place * strides_.token;
      for (; i < stop; ++i, offset += strides_.token) offsets[i] = offset;
    }
  }

  const WorkView& work_;
  const Piece* piece_;
  const Piece* last_;
  int32_t size_;
  PageStrides strides_;
  int32_t at_ = 0;
};

// The positions of a tile's pieces that the item's row j sees: first <= position < end.
struct Bounds {
  int32_t first, end;
};
inline Bounds bounds_of(const WorkView& work, const Item& item, const Piece& piece, int32_t j) {
  const Piece& from = work.grid ? work.pieces[item.pieces_at] : piece;
  Bounds bounds{position_of(work, from, larger(from.first, from.lo)),
                position_of(work, piece, smaller(piece.end + j * piece.step, piece.hi))};
  if (work.window) {
    const int32_t position = work.row_position[work.rows[item.rows_at + j]];
    const int64_t oldest = int64_t{position} - work.window + 1;
    if (oldest > bounds.first) {
      bounds.first = oldest < bounds.end ? static_cast<int32_t>(oldest) : bounds.end;
    }
  }
  return bounds;
}

inline void find_bounds(const WorkView& work, const Item& item, const Piece& piece, Bounds* rows) {
  for (int32_t j = 0; j < item.num_rows; ++j) rows[j] = bounds_of(work, item, piece, j);
}

// Whether every token of an item's piece is seen by one of its rows: a window hides only what is
// older, so rows that see up to the same token leave none out.
inline bool all_seen(const WorkView& work, const Piece& piece) {
  return work.window == 0 || piece.step == 0;
}

// Windows of rows that stand far apart leave tokens between them that no row sees. What they hold
// may be NaN, so they are read from a token that is seen; their weight is 0. False: nothing is seen.
inline bool skip_unseen(Tile& tile, const Bounds* rows, int32_t num_rows) {
  int32_t change[kMaxTile + 1] = {};
  for (int32_t j = 0; j < num_rows; ++j) {
    const int32_t from = clamp(rows[j].first - tile.start, 0, tile.count);
    const int32_t to = clamp(rows[j].end - tile.start, from, tile.count);
    ++change[from];
    --change[to];
  }
  int32_t seen = -1;
  for (int32_t i = 0, depth = 0; i < tile.count && seen < 0; ++i) {
    depth += change[i];
    if (depth > 0) seen = i;
  }
  if (seen < 0) return false;
  for (int32_t i = 0, depth = 0; i < tile.count; ++i) {
    depth += change[i];
    if (depth == 0) tile.offsets[i] = tile.offsets[seen];
  }
  return true;
}

// Shows a walker an item's tiles, of at most `size` tokens, each with the next: `attend_tile`. Before,
// `begin_piece`, with what its rows see in `bounds`; on the grid `begin_segment` behind the first, and
// `fold_segment` for each of the others when it has ended. Two tiles at `tiles`.
template <class Walker>
void walk_tiles(const AttentionCall& call, const Item& item, int32_t size, Tile* tiles,
                Bounds* bounds, Walker& walker) {
  TileWalk walk(call, item, size);
  Tile *now = tiles, *next = tiles + 1;
  const Piece* piece = nullptr;
  bool folded = false;
  for (bool more = walk.next(*now); more;) {
    more = walk.next(*next);
    if (call.work.grid && piece != nullptr && now->start == segment_start(now->start)) {
      if (folded) walker.fold_segment();
      walker.begin_segment();
      folded = true;
    }
    if (now->piece != piece) {
      piece = now->piece;
      find_bounds(call.work, item, *piece, bounds);
      walker.begin_piece();
    }
    if (all_seen(call.work, *piece) || skip_unseen(*now, bounds, item.num_rows)) {
      walker.attend_tile(*now, more ? next : nullptr);
    }
    Tile* done = now;
    now = next;
    next = done;
  }
  if (folded) walker.fold_segment();
}

// Asks for a tile's keys and values of one head ahead of their use, a few tokens at each call: a
// processor keeps some ten or twenty such requests and stops where there are more.
class Fetch {
 public:
  Fetch() = default;
  // `calls`: how often it will be called.
  Fetch(const Tile& tile, const void* k, const void* v, int64_t element_bytes, int64_t row_bytes,
        int32_t calls)
      : next_(tile.offsets),
        k_(static_cast<const char*>(k)),
        v_(static_cast<const char*>(v)),
        element_bytes_(element_bytes),
        row_bytes_(row_bytes),
        each_((tile.count + calls - 1) / calls),
        left_(tile.count) {}

  void operator()() {
    for (int32_t i = smaller(each_, left_); i > 0; --i, --left_) {
      const int64_t at = *next_++ * element_bytes_;
      for (int64_t byte = at; byte < at + row_bytes_; byte += 64) {
        __builtin_prefetch(k_ + byte, 0, 2);
        __builtin_prefetch(v_ + byte, 0, 2);
      }
    }
  }

 private:
  const int64_t* next_ = nullptr;
  const char *k_ = nullptr, *v_ = nullptr;
  int64_t element_bytes_ = 0, row_bytes_ = 0;
  int32_t each_ = 0, left_ = 0;
};

}  // namespace onestem::ONESTEM_ISA
