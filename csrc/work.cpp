#include "work.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

namespace onestem {

WorkView WorkList::view(const Plan& plan) const {
  return {plan.page_size, plan.run_pages.data(), plan.runs.data(), plan.row_position.data(), plan.window, grid, pieces.data(), rows.data(),
          states.data(), merges.data(), handed.data()};
}

namespace {

int32_t next_segment(int32_t position) {
  return segment_start(position) + segment_size(position);
}

// Rows that attend to the same pieces, in one item if it is not too wide or too long. Row j sees
// piece p up to end + j * step.
struct Unit {
  std::vector<int32_t> rows;
  std::vector<Piece> pieces;
  Hand hand = kKeeps;
};

// Estimated nanoseconds, for one KV head.
class Estimate {
 public:
  Estimate(const CostModel& cost, const Heads& heads, int32_t lanes)
      : cost_(cost), heads_(heads), lanes_(lanes) {}

  int32_t lanes_of(int64_t rows) const { return static_cast<int32_t>(rows) * heads_.group(); }

  double thin(int32_t lanes, double tokens) const {
    const double reading = cost_.rates.read * cost_.element_bytes, work = cost_.rates.thin * lanes;
    return tokens * 2 * heads_.dim * std::max(reading, work);
  }
  double wide(int32_t lanes, double tokens) const {
    const int32_t padded = (lanes + lanes_ - 1) / lanes_ * lanes_;
    const double reading = cost_.rates.read * cost_.element_bytes;
    const double pack = lanes <= lanes_ ? cost_.rates.pack_few : cost_.rates.pack;
    const double work = pack + cost_.rates.wide * padded;
    return tokens * 2 * heads_.dim * std::max(reading, work);
  }
  bool is_wide(int32_t lanes) const {
    return lanes > kThinLanes || wide(lanes, 1) < thin(lanes, 1);
  }
  double attend(int32_t lanes, double tokens) const {
    return is_wide(lanes) ? wide(lanes, tokens) : thin(lanes, tokens);
  }
  double states(int32_t lanes) const {
    return double{cost_.rates.state} * lanes * heads_.dim;
  }
  // What more lanes in a wide item cost.
  double in_wide(int32_t lanes, double tokens) const {
    return tokens * 2 * heads_.dim * cost_.rates.wide * lanes;
  }
  double item() const { return cost_.item / heads_.kv_heads; }

 private:
  const CostModel& cost_;
  const Heads& heads_;
  int32_t lanes_;
};

// Sets of consecutive rows with the same spans: a decode, a chunk.
struct Atoms {
  std::vector<int32_t> bounds;  // atom a: rows bounds[a]..bounds[a + 1]-1
  std::vector<int32_t> of_row;  // [num_queries + 1]

  explicit Atoms(const Plan& plan) {
    std::vector<uint8_t> cut(static_cast<size_t>(plan.num_queries()) + 1, 0);
    for (const Span& s : plan.spans) cut[s.row] = cut[s.row + s.rows] = 1;
    cut[0] = cut[plan.num_queries()] = 1;
    of_row.resize(cut.size());
    for (int32_t row = 0; row <= plan.num_queries(); ++row) {
      if (cut[row]) bounds.push_back(row);
      of_row[row] = static_cast<int32_t>(bounds.size()) - 1;
    }
  }
  size_t count() const { return bounds.size() - 1; }
  int32_t rows(size_t atom) const { return bounds[atom + 1] - bounds[atom]; }

  // What an atom sees by a span of its rows.
  Piece piece(const Span& s, size_t atom) const {
    const int32_t end = s.end + (bounds[atom] - s.row) * s.step;
    return {s.run, s.first, end + (rows(atom) - 1) * s.step, s.first, end, s.step};
  }
};

// Finds the units of a plan. An atom walks its spans one after the other, without a merge; a stretch
// of a run that several atoms see becomes a unit of its own where reading it once saves more than the
// merge costs.
class Units {
 public:
  Units(const Plan& plan, bool share, const Estimate& estimate)
      : plan_(plan), estimate_(estimate), atoms_(plan), walks_(atoms_.count()) {
    find_groups(share);
    for (int32_t i = 0; i < num_spans(); ++i) {
      if (leader_[i] == i) place_group(i);
    }
    for (size_t atom = 0; atom < walks_.size(); ++atom) {
      if (!walks_[atom].empty()) units.push_back(atom_unit(atom));
    }
  }

  std::vector<Unit> units;

 private:
  int32_t num_spans() const { return static_cast<int32_t>(plan_.spans.size()); }

  static bool moves(const Span& s) { return s.step == 1 && s.rows > 1; }

  // Spans over the same tokens that do not move are one group, chained behind its leader.
  void find_groups(bool share) {
    leader_.resize(num_spans());
    next_.assign(num_spans(), -1);
    std::iota(leader_.begin(), leader_.end(), 0);
    if (!share) return;
    std::vector<int32_t> first_of_run(plan_.runs.size(), -1), last(leader_);
    std::map<std::array<int32_t, 3>, int32_t> others;
    for (int32_t i = 0; i < num_spans(); ++i) {
      const Span& s = plan_.spans[i];
      if (moves(s)) continue;
      int32_t& first = first_of_run[s.run];
      if (first < 0) first = i;
      const Span& f = plan_.spans[first];
      if (f.first == s.first && f.end == s.end) {
        leader_[i] = first;
      } else {
        leader_[i] = others.try_emplace({s.run, s.first, s.end}, i).first->second;
      }
      if (leader_[i] != i) {
        next_[last[leader_[i]]] = i;
        last[leader_[i]] = i;
      }
    }
    shared_ = true;
  }

  // A group becomes a unit of the atoms that gain by it; the others walk it themselves.
  void place_group(int32_t leader) {
    const Span& s = plan_.spans[leader];
    const double tokens = std::max(0, s.end - s.first);
    std::vector<int32_t> together;
    double saved = 0;
    int32_t lanes = 0;
    if (shared_ && !moves(s)) {
      for_atoms(leader, [&](int32_t, int32_t atom) {
        const int32_t n = estimate_.lanes_of(atoms_.rows(atom));
        const double alone = estimate_.attend(n, tokens);
        if (alone > estimate_.in_wide(n, tokens) + estimate_.states(n)) {
          together.push_back(atom);
          lanes += n;
          saved += alone - estimate_.states(n);
        }
      });
    }
    const bool own =
        together.size() > 1 && saved > estimate_.attend(lanes, tokens) + estimate_.item();
    if (own) units.push_back(shared_unit(s, together));
    size_t at = 0;
    for_atoms(leader, [&](int32_t span, int32_t atom) {
      if (own && at < together.size() && together[at] == atom) {
        ++at;
      } else {
        walks_[atom].push_back(span);
      }
    });
  }

  // visit(span, atom) for the atoms of a group's spans.
  template <class Visit>
  void for_atoms(int32_t leader, Visit visit) const {
    for (int32_t i = leader; i >= 0; i = next_[i]) {
      const Span& s = plan_.spans[i];
      for (int32_t a = atoms_.of_row[s.row]; a < atoms_.of_row[s.row + s.rows]; ++a) visit(i, a);
    }
  }

  Unit shared_unit(const Span& s, const std::vector<int32_t>& atoms) const {
    Unit unit;
    for (int32_t atom : atoms) {
      const int32_t row = atoms_.bounds[atom];
      for (int32_t j = 0; j < atoms_.rows(atom); ++j) unit.rows.push_back(row + j);
    }
    unit.pieces.push_back({s.run, s.first, s.end, s.first, s.end, 0});
    return unit;
  }

  Unit atom_unit(size_t atom) const {
    Unit unit;
    unit.rows.resize(atoms_.rows(atom));
    std::iota(unit.rows.begin(), unit.rows.end(), atoms_.bounds[atom]);
    for (int32_t i : walks_[atom]) unit.pieces.push_back(atoms_.piece(plan_.spans[i], atom));
    return unit;
  }

  const Plan& plan_;
  const Estimate& estimate_;
  Atoms atoms_;
  bool shared_ = false;
  std::vector<int32_t> leader_, next_;
  std::vector<std::vector<int32_t>> walks_;  // spans of each atom
};

// The units on the grid. Atoms whose first segments are the same tokens walk them together; what an
// atom sees besides is a unit for each segment, or one for all if nothing is shared. `tile`: tokens
// between places where a walk may go on from another's states.
class GridUnits {
 public:
  GridUnits(const Plan& plan, bool share, int32_t tile)
      : plan_(plan),
        tile_(tile),
        atoms_(plan),
        walks_(atoms_.count()),
        shared_(atoms_.count()),
        handed_(atoms_.count()) {
    for (const Span& s : plan.spans) {
      for (int32_t a = atoms_.of_row[s.row]; a < atoms_.of_row[s.row + s.rows]; ++a) {
        const Piece piece = atoms_.piece(s, a);
        if (piece.hi > piece.lo) walks_[a].push_back(piece);
      }
    }
    for (size_t atom = 0; atom < walks_.size(); ++atom) {
      put_in_order(atom);
      if (!walks_[atom].empty()) shared_[atom] = start_of(walks_[atom][0]);
    }
    if (share) {
      find_shared();
      for (int32_t tiles = segment_size(INT32_MAX) / tile_ - 1; tiles > 0; --tiles) hand_over(tiles);
    }
    for (size_t atom = 0; atom < walks_.size(); ++atom) add_own(atom);
    std::stable_sort(units.begin(), units.end(), [&](const Unit& a, const Unit& b) {
      return start_of(a.pieces[0]) < start_of(b.pieces[0]);
    });
  }

  std::vector<Unit> units;

 private:
  using Key = std::vector<int32_t>;
  struct Hash {
    size_t operator()(const Key& key) const {
      uint64_t hash = 0xcbf29ce484222325;
      for (int32_t word : key) hash = (hash ^ static_cast<uint32_t>(word)) * 0x100000001b3;
      return hash;
    }
  };

  int32_t start_of(const Piece& p) const { return plan_.runs[p.run].position + p.lo; }
  int32_t stop_of(const Piece& p) const { return plan_.runs[p.run].position + p.hi; }

  void put_in_order(size_t atom) {
    std::vector<Piece>& walk = walks_[atom];
    std::sort(walk.begin(), walk.end(),
              [&](const Piece& a, const Piece& b) { return start_of(a) < start_of(b); });
    for (size_t i = 1; i < walk.size(); ++i) {
      const Piece& before = walk[i - 1];
      if (stop_of(before) != start_of(walk[i]) || (atoms_.rows(atom) > 1 && before.step != 0)) {
        throw std::invalid_argument("a row sees tokens at positions with a gap between them");
      }
    }
  }

  // Behind the last position that all rows of the atom see.
  int32_t whole_to(size_t atom) const {
    const Piece& last = walks_[atom].back();
    return plan_.runs[last.run].position + last.end;
  }

  // What of a walk is at positions from..to-1.
  std::vector<Piece> cut(size_t atom, int32_t from, int32_t to) const {
    std::vector<Piece> pieces;
    for (Piece piece : walks_[atom]) {
      const int32_t position = plan_.runs[piece.run].position;
      piece.lo = std::max(piece.lo, from - position);
      piece.hi = std::min(piece.hi, to - position);
      if (piece.lo < piece.hi) pieces.push_back(piece);
    }
    return pieces;
  }

  Key tokens_of(size_t atom, int32_t from, int32_t to) const {
    Key key;
    for (const Piece& p : cut(atom, from, to)) key.insert(key.end(), {p.run, p.lo, p.hi});
    return key;
  }

  // Finds segments that several atoms see whole, from their first on.
  void find_shared() {
    std::unordered_map<Key, std::vector<size_t>, Hash> seen;  // by tokens: atoms
    std::vector<std::vector<const std::vector<size_t>*>> groups(walks_.size());
    for (size_t atom = 0; atom < walks_.size(); ++atom) {
      if (walks_[atom].empty()) continue;
      const int32_t whole = whole_to(atom);
      for (int32_t at = start_of(walks_[atom][0]); next_segment(at) <= whole; at = next_segment(at)) {
        auto& atoms = seen[tokens_of(atom, at, next_segment(at))];
        atoms.push_back(atom);
        groups[atom].push_back(&atoms);
      }
    }
    for (size_t atom = 0; atom < walks_.size(); ++atom) add_shared(atom, groups[atom]);
  }

  // The units of shared segments whose first atom this is. Segments of the same atoms are walked in
  // one go from their first on; behind it each has a state of its own.
  void add_shared(size_t atom, const std::vector<const std::vector<size_t>*>& groups) {
    int32_t at = shared_[atom];
    for (size_t i = 0; i < groups.size() && groups[i]->size() > 1;) {
      const auto& atoms = *groups[i];
      int32_t to = next_segment(at);
      for (++i; i < groups.size() && at == start_of(walks_[atom][0]) && *groups[i] == atoms; ++i) {
        to = next_segment(to);
      }
      if (atoms[0] == atom) units.push_back(unit_of(atoms, atom, at, to));
      at = shared_[atom] = to;
    }
  }

  // Where rows part inside a segment: those that see its first `tiles` tiles have them in one unit.
  void hand_over(int32_t tiles) {
    std::unordered_map<Key, std::vector<size_t>, Hash> seen;  // by tokens: atoms
    std::vector<const std::vector<size_t>*> groups(walks_.size());
    const auto end_of = [&](int32_t from) { return (from / tile_ + tiles) * tile_; };
    for (size_t atom = 0; atom < walks_.size(); ++atom) {
      const int32_t from = shared_[atom], to = end_of(from);
      if (walks_[atom].empty() || atoms_.rows(atom) > 1 || handed_[atom] || to >= next_segment(from) ||
          to >= whole_to(atom)) {
        continue;
      }
      auto& atoms = seen[tokens_of(atom, from, to)];
      atoms.push_back(atom);
      groups[atom] = &atoms;
    }
    for (size_t atom = 0; atom < walks_.size(); ++atom) {
      if (groups[atom] == nullptr || groups[atom]->size() < 2) continue;
      handed_[atom] = end_of(shared_[atom]);
      if (groups[atom]->front() != atom) continue;
      units.push_back(unit_of(*groups[atom], atom, shared_[atom], handed_[atom]));
      units.back().hand = kLeaves;
    }
  }

  void add_own(size_t atom) {
    if (walks_[atom].empty()) return;
    const int32_t first = start_of(walks_[atom][0]), stop = stop_of(walks_[atom].back());
    const bool whole = shared_[atom] == first;
    Hand hand = handed_[atom] ? kGoesOn : kKeeps;
    for (int32_t at = std::max(shared_[atom], handed_[atom]); at < stop; hand = kKeeps) {
      const int32_t to = whole ? stop : std::min(stop, next_segment(at));
      units.push_back(unit_of({atom}, atom, at, to));
      units.back().hand = hand;
      at = to;
    }
  }

  Unit unit_of(const std::vector<size_t>& atoms, size_t walk, int32_t from, int32_t to) const {
    Unit unit{{}, cut(walk, from, to)};
    for (Piece& piece : unit.pieces) {
      if (atoms.size() > 1) piece = {piece.run, piece.lo, piece.hi, piece.lo, piece.hi, 0};
    }
    for (size_t atom : atoms) {
      for (int32_t j = 0; j < atoms_.rows(atom); ++j) unit.rows.push_back(atoms_.bounds[atom] + j);
    }
    return unit;
  }

  const Plan& plan_;
  int32_t tile_;
  Atoms atoms_;
  std::vector<std::vector<Piece>> walks_;
  std::vector<int32_t> shared_;  // positions up to which each atom walks with others
  std::vector<int32_t> handed_;  // and up to which it goes on from their states; 0: from none
};

// Some rows of a unit, with what they see of its pieces.
struct RowBlock {
  const Unit* unit;
  int32_t begin, count;
  bool wide;
  std::vector<Piece> pieces;
  double tokens;  // as an average row sees them
  double cost;    // of one KV head
};

class Cutter {
 public:
  Cutter(const Plan& plan, bool grid, const Heads& heads, const KernelsOf& kernels,
         const CostModel& cost, int32_t threads, const Estimate& estimate)
      : plan_(plan),
        grid_(grid),
        heads_(heads),
        cost_(cost),
        estimate_(estimate),
        wide_rows_(std::max(1, kernels.wide_lanes(heads.dim) / heads.group())),
        threads_(threads) {
    work_.grid = grid;
  }

  WorkList cut(const std::vector<Unit>& units) {
    for (const Unit& unit : units) cut_rows(unit);
    for (const RowBlock& block : blocks_) work_.cost += block.cost * heads_.kv_heads;
    longest_ = std::max<double>(cost_.shortest, work_.cost / (cost_.cuts * threads_));
    for (const RowBlock& block : blocks_) cut_tokens(block);
    place_states();
    std::stable_sort(work_.items.begin(), work_.items.end(),
                     [](const Item& a, const Item& b) {
                       const int32_t turn_a = turn_of(a), turn_b = turn_of(b);
                       return turn_a < turn_b || (turn_a == turn_b && a.cost > b.cost);
                     });
    return std::move(work_);
  }

 private:
  static int32_t turn_of(const Item& item) {
    return item.hand == kLeaves ? 0 : item.hand == kKeeps ? 1 : 2;
  }

  void cut_rows(const Unit& unit) {
    const int32_t rows = static_cast<int32_t>(unit.rows.size());
    const int32_t blocks = (rows + wide_rows_ - 1) / wide_rows_;
    for (int32_t b = 0; b < blocks; ++b) {
      const int32_t begin = static_cast<int32_t>(int64_t{rows} * b / blocks);
      const int32_t end = static_cast<int32_t>(int64_t{rows} * (b + 1) / blocks);
      RowBlock block{&unit, begin, end - begin, false, {}, 0, 0};
      find_pieces(block);
      if (block.pieces.empty()) continue;
      const int32_t lanes = estimate_.lanes_of(block.count);
      block.wide = grid_ || estimate_.is_wide(lanes);
      block.cost = (block.wide ? estimate_.wide(lanes, block.tokens)
                               : estimate_.thin(lanes, block.tokens)) +
                   estimate_.item();
      blocks_.push_back(std::move(block));
    }
  }

  // What some row of the block sees of each piece, windows considered.
  void find_pieces(RowBlock& block) const {
    int32_t oldest = INT32_MAX;
    for (int32_t j = 0; j < block.count; ++j) {
      oldest = std::min(oldest, plan_.row_position[block.unit->rows[block.begin + j]]);
    }
    for (Piece piece : block.unit->pieces) {
      piece.end += block.begin * piece.step;
      piece.hi = std::min(piece.hi, piece.end + (block.count - 1) * piece.step);
      if (plan_.window) {
        const int64_t first = int64_t{oldest} - plan_.window + 1 - plan_.runs[piece.run].position;
        piece.lo = static_cast<int32_t>(std::clamp<int64_t>(first, piece.lo, piece.hi));
      }
      if (piece.lo >= piece.hi) continue;
      block.pieces.push_back(piece);
      block.tokens += piece.hi - piece.lo - 0.5 * (block.count - 1) * piece.step;
    }
    block.tokens = std::max(block.tokens, 1.0);
  }

  void cut_tokens(const RowBlock& block) {
    int64_t tokens = 0;
    for (const Piece& piece : block.pieces) tokens += piece.hi - piece.lo;
    const bool apart = block.wide && !grid_;  // whether each KV head has items of its own
    const double whole = block.cost * (apart ? 1 : heads_.kv_heads);
    const int64_t wanted =
        threads_ > 1 ? std::max<int64_t>(1, static_cast<int64_t>(std::ceil(whole / longest_))) : 1;
    if (grid_) return cut_segments(block, tokens, wanted, whole);
    const int64_t parts = std::clamp<int64_t>(tokens / kShortestPart, 1, wanted);
    const int64_t head_parts =
        apart ? heads_.kv_heads
              : std::min<int64_t>(heads_.kv_heads, (wanted + parts - 1) / parts);
    for (int64_t i = 0; i < parts; ++i) {
      // Whole steps of kernels' tiles, so that no part ends in a short one.
      add_part(block, begin_of(i, parts, tokens), begin_of(i + 1, parts, tokens), head_parts,
               whole / static_cast<double>(apart ? parts : parts * head_parts));
    }
  }

  // The first part may be of several segments, the others are one each.
  void cut_segments(const RowBlock& block, int64_t tokens, int64_t wanted, double whole) {
    const int64_t head_parts = std::min<int64_t>(heads_.kv_heads, wanted);
    const int64_t length = tokens * head_parts / wanted;
    const Piece& piece = block.pieces[0];
    const int32_t first = plan_.runs[piece.run].position + piece.lo;
    int64_t at = 0;
    do {
      const int64_t wished = wanted == head_parts ? tokens : at == 0 ? length : 1;
      const int64_t last = std::min(tokens, at + wished) - 1;
      const int64_t end = std::min<int64_t>(tokens, next_segment(first + static_cast<int32_t>(last)) - first);
      const double part = static_cast<double>(end - at) / static_cast<double>(tokens);
      add_part(block, at, end, head_parts, whole * part / static_cast<double>(head_parts));
      at = end;
    } while (at < tokens);
  }

  static int64_t begin_of(int64_t part, int64_t parts, int64_t tokens) {
    return part == parts ? tokens : tokens * part / parts / kPartStep * kPartStep;
  }

  // An item for each set of KV heads over tokens from..to-1 of the block's walk.
  void add_part(const RowBlock& block, int64_t from, int64_t to, int64_t head_parts, double cost) {
    Item item{};
    item.rows_at = static_cast<int32_t>(work_.rows.size());
    item.num_rows = block.count;
    item.pieces_at = static_cast<int32_t>(work_.pieces.size());
    item.wide = block.wide;
    item.hand = from == 0 ? block.unit->hand : kKeeps;
    int64_t at = 0;
    for (const Piece& piece : block.pieces) {
      Piece cut = piece;
      const int64_t length = piece.hi - piece.lo;
      cut.lo = piece.lo + static_cast<int32_t>(std::clamp<int64_t>(from - at, 0, length));
      cut.hi = piece.lo + static_cast<int32_t>(std::clamp<int64_t>(to - at, 0, length));
      at += length;
      if (cut.lo < cut.hi) work_.pieces.push_back(cut);
    }
    item.num_pieces = static_cast<int32_t>(work_.pieces.size()) - item.pieces_at;
    const auto rows = block.unit->rows.begin() + block.begin;
    work_.rows.insert(work_.rows.end(), rows, rows + block.count);
    leaves_.resize(work_.rows.size(), item.hand == kLeaves);
    if (item.hand == kLeaves) work_.num_leaving += static_cast<int32_t>(head_parts);
    item.cost = static_cast<float>(cost);
    for (int64_t h = 0; h < head_parts; ++h) {
      item.head = static_cast<int32_t>(heads_.kv_heads * h / head_parts);
      item.num_heads = static_cast<int32_t>(heads_.kv_heads * (h + 1) / head_parts) - item.head;
      work_.items.push_back(item);
    }
  }

  // States of one row stand side by side; a row in one part needs none, unless a moved row has it.
  void place_states() {
    work_.merges.assign(plan_.num_rows(), {0, 0});
    std::vector<uint8_t> moved(plan_.num_rows(), 0);
    for (size_t part = 0; part < work_.rows.size(); ++part) {
      const int32_t query = work_.rows[part];
      work_.merges[plan_.row_of(query)].count += !leaves_[part];
      if (query >= plan_.num_rows()) moved[plan_.row_of(query)] = 1;
    }
    for (int32_t row = 0; row < plan_.num_rows(); ++row) {
      Merge& merge = work_.merges[row];
      if (merge.count == 0) work_.empty_rows.push_back(row);
      merge.state = work_.num_states;
      if (merge.count > 1 || moved[row]) work_.num_states += merge.count;
    }
    std::vector<int32_t> taken(plan_.num_rows(), 0);
    work_.states.reserve(work_.rows.size());
    work_.handed.assign(plan_.num_rows(), -1);
    for (size_t part = 0; part < work_.rows.size(); ++part) {
      const int32_t query = work_.rows[part], row = plan_.row_of(query);
      if (leaves_[part]) {
        work_.states.push_back(work_.handed[row] = work_.num_states++);
        continue;
      }
      const Merge& merge = work_.merges[row];
      work_.states.push_back(merge.count > 1 || moved[row] ? merge.state + taken[row]++ : -1);
    }
  }

  static constexpr int64_t kShortestPart = 64;
  static constexpr int64_t kPartStep = 32;

  const Plan& plan_;
  bool grid_;
  const Heads& heads_;
  const CostModel& cost_;
  const Estimate& estimate_;
  int32_t wide_rows_, threads_;
  double longest_ = 0;
  std::vector<RowBlock> blocks_;
  std::vector<uint8_t> leaves_;  // [parts]
  WorkList work_;
};

}  // namespace

WorkList make_work(const Plan& plan, const Rules& rules, const Heads& heads,
                   const KernelsOf& kernels, const CostModel& cost, int32_t threads) {
  const Estimate estimate(cost, heads, kernels.lanes);
  Cutter cutter(plan, rules.grid, heads, kernels, cost, threads, estimate);
  if (rules.grid && !plan.moved.empty()) {
    throw std::invalid_argument("a row sees tokens at other positions than they were stored at");
  }
  if (rules.grid) return cutter.cut(GridUnits(plan, rules.share, kernels.grid_keys).units);
  return cutter.cut(Units(plan, rules.share, estimate).units);
}

}  // namespace onestem
