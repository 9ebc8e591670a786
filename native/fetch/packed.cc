#include "fetch/packed.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/copy.h"
#include "base/errors.h"
#include "fetch/lines.h"
#include "fetch/pieces.h"

namespace geartrain {
namespace {

constexpr uint32_t kPackedTries = 64;
// Rows whose words, or whose spans' heads, are asked for while an earlier one is looked at; and pieces.
constexpr size_t kRowsAhead = 8, kPiecesAhead = 8;
// Regions of this size and more do not stay in a cache between two rounds of puts (fetch.cc).
constexpr uint64_t kColdSpans = 64 << 20;
constexpr size_t kBoundsAtOnce = 256;
constexpr uint32_t kMostItems = 1 << 24;  // that are appended to, of one row

size_t padded_bytes(size_t bytes) {
  return (bytes + kSpanUnit - 1) / kSpanUnit * kSpanUnit;
}

// The bounds of strings in a span, each within the text and none before the one before it. They may be anybody's.
template <typename Each>
void for_each_bound(const std::byte* from, uint32_t count, uint64_t text, Each&& each) {
  uint32_t some[kBoundsAtOnce];
  uint64_t last = 0;
  for (uint32_t at = 0; at < count;) {
    const uint32_t n = std::min<uint32_t>(kBoundsAtOnce, count - at);
    copy_block(some, from + 4 * uint64_t{at}, 4 * uint64_t{n}, false);
    for (uint32_t i = 0; i < n; ++i, ++at) {
      last = std::clamp<uint64_t>(some[i], last, text);
      each(at, last);
    }
  }
}

const Tasks& tasks_of(const Store& store) {
  if (store.tasks() == nullptr) fail(ErrorKind::schema, "the store has neither axes nor tasks");
  return *store.tasks();
}

std::vector<FieldRecord> records_of(const Store& store) {
  return {store.fields(), store.fields() + store.header().field_count};
}

}  // namespace

// --- what is read -------------------------------------------------------------------------------------------------

PackedPlan::PackedPlan(const Store& store, std::span<const uint32_t> fields, std::span<const uint32_t> axes)
    : store_(store) {
  const Tasks& tasks = tasks_of(store);
  for (const uint32_t number : fields) {
    if (number >= store.header().field_count) fail(ErrorKind::schema, "no field number ", number);
    const FieldRecord& record = store.fields()[number];
    Field made{number, kColumn, 0, kNone, record.block_bytes, record.kind};
    if (in_spans(record)) {
      made.source = source_of(record.task);
      const std::vector<SpanField>& all = tasks.layout(record.task).fields();
      const auto found = std::ranges::find(all, number, &SpanField::field);
      made.piece = static_cast<uint32_t>(found - all.begin());
      if (record.axis != 0) made.axis = axis_of(record.axis);
    }
    fields_.push_back(made);
  }
  for (const uint32_t axis : axes) {
    if (axis == 0 || axis > tasks.described().axis_count) fail(ErrorKind::schema, "no axis number ", axis);
    axis_of(static_cast<uint8_t>(axis));
  }
}

uint32_t PackedPlan::source_of(uint32_t task) {
  const auto found = std::ranges::find(sources_, task);
  if (found == sources_.end()) return sources_.push_back(task), static_cast<uint32_t>(sources_.size() - 1);
  return static_cast<uint32_t>(found - sources_.begin());
}

uint32_t PackedPlan::axis_of(uint8_t number) {
  const auto found = std::ranges::find(axes_, number, &Axis::number);
  if (found != axes_.end()) return static_cast<uint32_t>(found - axes_.begin());
  const AxisRecord& record = tasks_of(store_).described().axes[number - 1];
  const auto place = static_cast<uint32_t>(axes_.size());
  axes_.push_back({number, source_of(record.owner)});
  if (record.divided == 0) return place;
  const uint32_t divider = record.divided - 1;
  const std::vector<SpanField>& all = tasks_of(store_).layout(record.owner).fields();
  axes_[place].divider = static_cast<uint32_t>(std::ranges::find(all, divider, &SpanField::field) - all.begin());
  const uint32_t by = axis_of(store_.fields()[divider].axis);
  axes_[place].by = by;
  return place;
}

// --- reading ------------------------------------------------------------------------------------------------------

PackedRows::PackedRows(const PackedPlan& plan, std::span<const uint32_t> rows, std::span<const uint32_t> generations)
    : plan_(&plan), rows_(rows.begin(), rows.end()), generations_(generations.begin(), generations.end()) {
  if (rows.size() != generations.size()) {
    fail(ErrorKind::schema, rows.size(), " rows were given with ", generations.size(), " generations");
  }
}

uint64_t PackedRows::read(const Room& room, unsigned threads) {
  for (uint32_t tries = 0;; ++tries) {
    if (tries == kPackedTries) {
      fail(ErrorKind::turnover, "rows of other sizes were written before they could be copied, ", kPackedTries,
           " times in a row");
    }
    locate_all();
    bind(room(place()));
    copy(threads);
    if (settle()) break;
  }
  const auto torn = static_cast<uint64_t>(std::ranges::count(torn_, uint8_t{1}));
  const auto unready = size() - static_cast<size_t>(std::ranges::count(unready_, uint8_t{0}));
  const Store& store = plan_->store();
  if (torn > unready && !store.read_only()) {
    store.control().counters.torn.fetch_add(torn - unready, std::memory_order_relaxed);
  }
  return torn;
}

bool PackedRows::holds(size_t i) const {
  // Everything was read before these are read again; a writer changes them first.
  std::atomic_thread_fence(std::memory_order_acquire);
  const Tasks& tasks = *plan_->store().tasks();
  if (!tasks.has_key(rows_[i], generations_[i])) return false;
  const std::atomic<uint64_t>* const words = tasks.words(rows_[i]);
  const std::vector<uint32_t>& sources = plan_->sources();
  for (size_t s = 0; s < sources.size(); ++s) {
    if (words[sources[s]].load(std::memory_order_relaxed) != words_[i * sources.size() + s]) return false;
  }
  return true;
}

PackedRows::Found PackedRows::locate(size_t i) {
  const Store& store = plan_->store();
  const Tasks& tasks = *store.tasks();
  const std::vector<uint32_t>& sources = plan_->sources();
  const std::vector<PackedPlan::Field>& fields = plan_->fields();
  const std::vector<PackedPlan::Axis>& axes = plan_->axes();
  const uint32_t row = rows_[i];
  uint32_t* const lengths = lengths_.data() + i * axes.size();
  unready_[i] = 0;
  std::fill_n(lengths, axes.size(), 0);
  for (std::vector<int32_t>& each : row_parts_) each.clear();
  if (!tasks.has_key(row, generations_[i])) return Found::stale;
  versions_[i] = store.status()[row].version.load(std::memory_order_relaxed);
  for (size_t s = 0; s < sources.size(); ++s) {
    const uint64_t packed = tasks.words(row)[sources[s]].load(std::memory_order_acquire);
    words_[i * sources.size() + s] = packed;
    if (TaskWord::of(packed).state == TaskState::done) continue;
    unready_[i] = static_cast<uint8_t>(sources[s] + 1);
    return Found::unready;
  }
  std::array<AxisLengths, kMaxTasks + 1> told;
  for (size_t s = 0; s < sources.size(); ++s) {
    const uint64_t span = tasks.filled(TaskWord::of(words_[i * sources.size() + s]));
    const SpanHead* const head = span == 0 ? nullptr : tasks.heap().head(span);
    if (head == nullptr || !head->is_of(row, sources[s])) return Found::unsound;
    const uint64_t units = head->size.load(std::memory_order_relaxed) & kSpanUnits;
    if (units == 0 || units > tasks.heap().units() - span) return Found::unsound;
    for (uint32_t a = 0; a < kMaxAxes; ++a) told[s][a] = head->lengths[a].load(std::memory_order_relaxed);
    const SpanLayout& layout = tasks.layout(sources[s]);
    located_.resize(layout.fields().size());
    const auto* const from = reinterpret_cast<const std::byte*>(head);
    if (!layout.locate(from, units, told[s], located_)) return Found::unsound;
    for (size_t f = 0; f < fields.size(); ++f) {
      if (fields[f].source != s) continue;
      const SpanPiece& at = located_[fields[f].piece];
      if (fields[f].kind == SpanKind::array) {
        piece(f, i) = {from + at.at, at.bytes};
        continue;
      }
      const auto strings = static_cast<uint32_t>(layout.fields()[fields[f].piece].items(told[s]));
      piece(f, i) = {from + at.at, at.bytes - 4 * (uint64_t{strings} + 1), strings};
    }
    for (size_t a = 0; a < axes.size(); ++a) {
      if (axes[a].source != s) continue;
      lengths[a] = told[s][axes[a].number - 1];
      if (axes[a].divider == PackedPlan::kNone) continue;
      const SpanPiece& at = located_[axes[a].divider];
      std::vector<int32_t>& parts = row_parts_[a];
      parts.resize(at.bytes / 4);
      copy_block(parts.data(), from + at.at, at.bytes, false);
      uint64_t sum = 0;
      for (const int32_t part : parts) {
        if (part < 0) return Found::unsound;
        sum += static_cast<uint64_t>(part);
      }
      if (sum != lengths[a]) return Found::unsound;
    }
  }
  for (size_t f = 0; f < fields.size(); ++f) {
    if (fields[f].source == PackedPlan::kColumn) {
      piece(f, i) = {store.block(fields[f].field, row), fields[f].item_bytes};
    } else if (fields[f].axis != PackedPlan::kNone &&
               told[fields[f].source][axes[fields[f].axis].number - 1] != lengths[fields[f].axis]) {
      return Found::unsound;
    }
  }
  return Found::whole;
}

// What is unsound may have been read while its span was being freed. Then its words have changed by the next look.
PackedRows::Found PackedRows::locate_soundly(size_t i) {
  for (uint32_t tries = 0; tries < kPackedTries; ++tries) {
    const Found found = locate(i);
    if (found != Found::unsound) return found;
  }
  plan_->store().fail_damaged("spans that cannot be read are those of row", rows_[i]);
}

void PackedRows::locate_all() {
  const size_t n = size(), of_axes = plan_->axes().size();
  const Tasks& tasks = *plan_->store().tasks();
  const std::vector<uint32_t>& sources = plan_->sources();
  torn_.assign(n, 0);
  unready_.assign(n, 0);
  versions_.assign(n, 0);
  words_.assign(n * sources.size(), 0);
  pieces_.assign(n * plan_->fields().size(), {});
  lengths_.assign(n * of_axes, 0);
  parts_.assign(of_axes, {});
  row_parts_.assign(of_axes, {});
  const auto there = [&](size_t i) { return i < n && rows_[i] < plan_->store().header().capacity; };
  const auto ask_for_words = [&](size_t i) {
    if (!there(i)) return;
    __builtin_prefetch(&plan_->store().words()[rows_[i]]);
    __builtin_prefetch(&plan_->store().status()[rows_[i]]);
    __builtin_prefetch(tasks.words(rows_[i]));
  };
  const auto ask_for_heads = [&](size_t i) {
    if (!there(i)) return;
    for (const uint32_t source : sources) {
      const SpanHead* const head = tasks.heap().head(tasks.word(rows_[i], source).span);
      if (head == nullptr) continue;
      __builtin_prefetch(head);
      __builtin_prefetch(head + 1);  // lengths that divide an axis
    }
  };
  for (size_t i = 0; i < 2 * kRowsAhead; ++i) ask_for_words(i);
  for (size_t i = 0; i < kRowsAhead; ++i) ask_for_heads(i);
  for (size_t i = 0; i < n; ++i) {
    ask_for_words(i + 2 * kRowsAhead);
    ask_for_heads(i + kRowsAhead);
    torn_[i] = locate_soundly(i) != Found::whole;
    if (torn_[i] != 0) {
      std::fill_n(lengths_.begin() + static_cast<ptrdiff_t>(i * of_axes), of_axes, 0);
      std::fill_n(pieces_.begin() + static_cast<ptrdiff_t>(i * plan_->fields().size()), plan_->fields().size(),
                  Piece{});
      continue;
    }
    for (size_t a = 0; a < of_axes; ++a) parts_[a].insert(parts_[a].end(), row_parts_[a].begin(), row_parts_[a].end());
  }
}

size_t PackedRows::place() {
  const size_t n = size();
  const std::vector<PackedPlan::Axis>& axes = plan_->axes();
  const std::vector<PackedPlan::Field>& fields = plan_->fields();
  item_at_.assign(axes.size(), std::vector<uint64_t>(n + 1));
  for (size_t a = 0; a < axes.size(); ++a) {
    for (size_t i = 0; i < n; ++i) item_at_[a][i + 1] = item_at_[a][i] + lengths_[i * axes.size() + a];
    if (item_at_[a][n] > INT32_MAX) {
      fail(ErrorKind::schema, "rows of ", item_at_[a][n], " ",
           plan_->store().tasks()->described().axes[axes[a].number - 1].name, " are read together, and at most ",
           INT32_MAX, " fit into one batch; read fewer rows");
    }
  }
  size_t used = 0;
  const auto take = [&](uint64_t bytes) {
    const size_t at = used;
    if (bytes > (uint64_t{1} << 56)) fail(ErrorKind::no_space, "a batch of ", n, " rows is larger than memory can be");
    used += padded_bytes(bytes);
    return at;
  };
  places_.assign(fields.size(), {});
  values_.assign(fields.size(), {});
  text_at_.assign(fields.size(), {});
  nbytes_ = 0;
  for (size_t f = 0; f < fields.size(); ++f) {
    const PackedPlan::Field& field = fields[f];
    FieldValues& made = values_[f];
    made.items = field.axis == PackedPlan::kNone ? n : item_at_[field.axis][n];
    if (field.kind == SpanKind::array) {
      made.bytes = made.items * field.item_bytes;
    } else {
      text_at_[f].resize(n + 1);
      for (size_t i = 0; i < n; ++i) text_at_[f][i + 1] = text_at_[f][i] + piece(f, i).bytes;
      made.bytes = text_at_[f][n];
      places_[f].bounds = take(8 * (made.items + 1));
    }
    places_[f].values = take(made.bytes);
    nbytes_ += made.bytes;
  }
  axis_places_.assign(axes.size(), {});
  told_.assign(axes.size(), {});
  for (size_t a = 0; a < axes.size(); ++a) {
    axis_places_[a].lengths = take(4 * n);
    axis_places_[a].bounds = take(4 * (n + 1));
    if (axes[a].divider != PackedPlan::kNone) axis_places_[a].parts = take(4 * (parts_[a].size() + 1));
  }
  return used;
}

void PackedRows::bind(std::byte* base) {
  const size_t n = size();
  const std::vector<PackedPlan::Field>& fields = plan_->fields();
  for (size_t f = 0; f < fields.size(); ++f) {
    values_[f].at = base + places_[f].values;
    if (fields[f].kind == SpanKind::array) continue;
    values_[f].bounds = {reinterpret_cast<int64_t*>(base + places_[f].bounds), values_[f].items + 1};
    std::ranges::fill(values_[f].bounds, 0);
    values_[f].bounds[values_[f].items] = static_cast<int64_t>(values_[f].bytes);
  }
  const std::vector<PackedPlan::Axis>& axes = plan_->axes();
  for (size_t a = 0; a < axes.size(); ++a) {
    const auto at = [&](size_t offset, size_t count) {
      return std::span<int32_t>(reinterpret_cast<int32_t*>(base + offset), count);
    };
    AxisLengths32& told = told_[a];
    told.lengths = at(axis_places_[a].lengths, n);
    told.bounds = at(axis_places_[a].bounds, n + 1);
    for (size_t i = 0; i < n; ++i) told.lengths[i] = static_cast<int32_t>(lengths_[i * axes.size() + a]);
    for (size_t i = 0; i <= n; ++i) told.bounds[i] = static_cast<int32_t>(item_at_[a][i]);
    if (axes[a].divider == PackedPlan::kNone) continue;
    told.parts = at(axis_places_[a].parts, parts_[a].size() + 1);
    int32_t sum = 0;
    for (size_t i = 0; i < parts_[a].size(); ++i) {
      told.parts[i] = sum;
      sum += parts_[a][i];
    }
    told.parts[parts_[a].size()] = sum;
  }
}

void PackedRows::copy_piece(size_t f, size_t i, bool stream) const {
  const PackedPlan::Field& field = plan_->fields()[f];
  const Piece& from = piece(f, i);
  if (from.from == nullptr) return;
  const FieldValues& to = values_[f];
  const uint64_t item = field.axis == PackedPlan::kNone ? i : item_at_[field.axis][i];
  if (field.kind == SpanKind::array) {
    copy_lines(to.at + item * field.item_bytes, from.from, from.bytes, stream);
    return;
  }
  const uint64_t base = text_at_[f][i];
  for_each_bound(from.from, from.strings, from.bytes,
                 [&](uint32_t j, uint64_t bound) { to.bounds[item + j] = static_cast<int64_t>(base + bound); });
  copy_lines(to.at + base, from.from + 4 * (uint64_t{from.strings} + 1), from.bytes, stream);
}

void PackedRows::copy(unsigned threads) const {
  const size_t n = size(), all = n * plan_->fields().size();
  const bool stream = nbytes_ >= stream_from();
  run_in_pieces(all, nbytes_, threads, [&](size_t first, size_t last) {
    const auto ask_for = [&](size_t k) {
      const Piece& from = piece(k / n, k % n);
      if (k < last && from.from != nullptr) prefetch_piece(from.from, from.bytes);
    };
    for (size_t k = first; k < std::min(last, first + kPiecesAhead); ++k) ask_for(k);
    for (size_t k = first; k < last; ++k) {
      if (k + kPiecesAhead < last) ask_for(k + kPiecesAhead);
      copy_piece(k / n, k % n, stream);
    }
    if (stream) stream_fence();
  });
}

// Whether all rows that are not torn are whole; false where one is torn by now, or does not fit into its place.
bool PackedRows::settle() {
  for (size_t i = 0; i < size(); ++i) {
    if (torn_[i] == 0 && !holds(i) && !copy_again(i)) return false;
  }
  return true;
}

bool PackedRows::copy_again(size_t i) {
  const size_t of_fields = plan_->fields().size(), of_axes = plan_->axes().size();
  const auto lengths_of = [&] {
    const auto from = lengths_.begin() + static_cast<ptrdiff_t>(i * of_axes);
    return std::vector<uint32_t>(from, from + static_cast<ptrdiff_t>(of_axes));
  };
  const std::vector<uint32_t> before = lengths_of();
  std::vector<uint64_t> sizes;
  for (size_t f = 0; f < of_fields; ++f) sizes.push_back(piece(f, i).bytes);
  for (uint32_t tries = 0; tries < kPackedTries; ++tries) {
    bool fits = locate_soundly(i) == Found::whole && lengths_of() == before;
    for (size_t f = 0; f < of_fields; ++f) fits = fits && piece(f, i).bytes == sizes[f];
    for (size_t a = 0; fits && a < of_axes; ++a) {
      const std::vector<int32_t>& found = row_parts_[a];
      if (plan_->axes()[a].divider == PackedPlan::kNone) continue;
      fits = std::ranges::equal(found, std::span(parts_[a]).subspan(item_at_[plan_->axes()[a].by][i], found.size()));
    }
    if (!fits) return false;
    for (size_t f = 0; f < of_fields; ++f) copy_piece(f, i, false);
    if (holds(i)) return true;
  }
  fail(ErrorKind::turnover, "row ", rows_[i], " was rewritten before it could be copied, ", kPackedTries,
       " times in a row");
}

// --- batches of a replay ------------------------------------------------------------------------------------------

void PackedCopier::launch(const RowsToCopy& rows) {
  const Store::Call call(plan_.store());
  if (rows.rows.size() != rows.of) fail(ErrorKind::schema, "packed rows are copied all together");
  rows_ = PackedRows(plan_, rows.rows, rows.generations);
  rows_.read(room_, threads_);
}

CopiedRows PackedCopier::resolve() {
  const size_t n = rows_.size();
  CopiedRows made;
  made.torn.assign(rows_.torn().begin(), rows_.torn().end());
  made.lengths.assign(n, 1);
  made.starts.assign(n, 0);
  made.steps.assign(n, 1);
  made.versions.assign(rows_.versions().begin(), rows_.versions().end());
  return made;
}

// --- writing ------------------------------------------------------------------------------------------------------

namespace {

const std::byte* span_bytes(const Tasks& tasks, uint64_t span, uint64_t units) {
  const SpanHead* const head = tasks.heap().head(span);
  if (head == nullptr || units > tasks.heap().units() - span) {
    fail(ErrorKind::corrupt, "a row's task leads to unit ", span, ", of ", tasks.heap().units());
  }
  return reinterpret_cast<const std::byte*>(head);
}

// Where the parts of one row that were appended lie. Their owner may have lost them meanwhile: what is read then is
// anything, and all of it within the region.
class AppendedPieces {
 public:
  AppendedPieces(const Store& store, uint32_t task, const Appended& appended)
      : layout_(records_of(store), task, appended.axis), appended_(appended) {
    const size_t fields = layout_.fields().size();
    std::vector<SpanPiece> found(fields);
    for (const ChainPart& part : appended.parts) {
      const std::byte* const from = span_bytes(*store.tasks(), part.span, part.units);
      if (!layout_.locate(from, part.units, part.lengths, found)) {
        found.assign(fields, {kSpanUnit, 0});
        lost_ = true;
      }
      for (size_t f = 0; f < fields; ++f) pieces_.push_back({from + found[f].at, found[f].bytes});
    }
  }

  bool lost() const { return lost_; }
  // Index of a field in here; fields() where it has none.
  size_t index_of(uint32_t field) const {
    const auto& all = layout_.fields();
    return static_cast<size_t>(std::ranges::find(all, field, &SpanField::field) - all.begin());
  }
  size_t fields() const { return layout_.fields().size(); }
  bool strings(size_t f) const { return f >= layout_.arrays(); }

  // each(from, bytes, strings, bounds) of every part
  template <typename Each>
  void for_each(size_t f, Each&& each) const {
    for (size_t p = 0; p < appended_.parts.size(); ++p) {
      const auto [from, bytes] = pieces_[p * fields() + f];
      if (!strings(f) || lost_) {
        each(from, lost_ ? 0 : bytes, 0, from);
        continue;
      }
      const uint32_t count = appended_.parts[p].lengths[appended_.axis - 1];
      const uint64_t bounds = 4 * (uint64_t{count} + 1);
      each(from + bounds, bytes - bounds, count, from);
    }
  }
  uint64_t bytes(size_t f) const {
    uint64_t sum = 0;
    for_each(f, [&](const std::byte*, uint64_t bytes, uint32_t, const std::byte*) { sum += bytes; });
    return sum;
  }

 private:
  SpanLayout layout_;
  const Appended& appended_;
  std::vector<std::pair<const std::byte*, uint64_t>> pieces_;  // (parts, fields)
  bool lost_ = false;
};

// Where the values of rows that are written come from, and where they go.
class SpanWriter {
 public:
  SpanWriter(const Store& store, uint32_t task, uint8_t axis, size_t rows, std::span<const PackedSource> sources,
             std::span<const Appended> appended)
      : store_(store), task_(task), appended_(appended) {
    const Tasks& tasks = tasks_of(store);
    if (task > tasks.count()) fail(ErrorKind::schema, "no task number ", task);
    if (!appended.empty() && appended.size() != rows) {
      fail(ErrorKind::schema, rows, " rows were given with what was appended to ", appended.size());
    }
    layout_ = axis == 0 ? tasks.layout(task) : SpanLayout(records_of(store), task, axis);
    for (const SpanField& field : layout_.fields()) {
      const PackedSource* from = nullptr;
      for (const PackedSource& each : sources) {
        if (each.field != field.field) continue;
        if (from != nullptr) fail(ErrorKind::schema, "field '", name(field.field), "' was given twice");
        from = &each;
      }
      if (from != nullptr && from->runs.size() != rows && from->runs.size() != 1) {
        fail(ErrorKind::schema, "field '", name(field.field), "' was given for ", from->runs.size(), " of ", rows,
             " rows");
      }
      from_.push_back(from);
    }
    for (const PackedSource& each : sources) {
      if (std::ranges::find(layout_.fields(), each.field, &SpanField::field) == layout_.fields().end()) {
        fail(ErrorKind::schema, "field '", each.field < store.header().field_count ? name(each.field) : "?",
             "' is not written here");
      }
    }
    string_bytes_.resize(layout_.fields().size() - layout_.arrays());
    pieces_.resize(layout_.fields().size());
    passed_.resize(layout_.fields().size());
  }

  const char* name(uint32_t field) const { return store_.fields()[field].name; }

  // Rows are taken in their order, each by one of these.
  void size(TaskRow& row, size_t i) {
    check_lengths(row, i);
    const std::optional<AppendedPieces> chain = chain_of(i);
    measure(row, i, chain);
    row.units = 0;
    if (!layout_.empty()) {
      row.units = layout_.place(row.lengths, string_bytes_, pieces_);
      if (row.units == 0) {
        fail(ErrorKind::schema, "row ", i, " of those written is larger than a row may be: 4 GB of strings in a field");
      }
    }
    pass(row, i);
  }

  // A row's place in the flat runs, so that rows can be filled by several threads.
  struct Place {
    std::vector<std::pair<uint64_t, uint64_t>> passed;  // of each field: bytes, and strings
  };
  std::vector<Place> places(std::span<const TaskRow> rows) {
    std::vector<Place> made;
    for (size_t i = 0; i < rows.size(); ++i) {
      made.push_back({passed_});
      pass(rows[i], i);
    }
    return made;
  }

  void fill(const TaskRow& row, size_t i, const Place& place, bool stream) {
    passed_ = place.passed;
    const std::optional<AppendedPieces> chain = chain_of(i);
    measure(row, i, chain);
    if (layout_.place(row.lengths, string_bytes_, pieces_) != row.units) {
      if (chain) return;  // the row was lost meanwhile, as its owner finds out with the write's end
      fail_changed(i);
    }
    auto* const span = const_cast<std::byte*>(span_bytes(*store_.tasks(), row.span, row.units));
    for (size_t f = 0; f < layout_.fields().size(); ++f) {
      const SpanField& field = layout_.fields()[f];
      std::byte* const to = span + pieces_[f].at;
      if (divides_appended(f, i)) {
        if (pieces_[f].bytes != 4 * appended_[i].lengths.size()) fail_changed(i);
        copy_block(to, appended_[i].lengths.data(), pieces_[f].bytes, false);
      } else if (is_appended(f, i)) {
        const size_t its = chain->index_of(field.field);
        if (chain->lost()) return;
        if (f < layout_.arrays() && pieces_[f].bytes != chain->bytes(its)) fail_changed(i);
        fill_appended(f, *chain, to, field.items(row.lengths), stream);
      } else if (f < layout_.arrays()) {
        copy_block(to, run(f, i), pieces_[f].bytes, stream);
      } else {
        fill_strings(to, field.items(row.lengths), run_sizes(f, i), run(f, i), string_bytes_[f - layout_.arrays()],
                     stream);
      }
    }
  }

 private:
  [[noreturn]] static void fail_changed(size_t i) {
    fail(ErrorKind::schema, "row ", i, " of those written has other lengths than when it was sized");
  }
  bool divides_appended(size_t f, size_t i) const {
    return !appended_.empty() && appended_[i].axis != 0 &&
           store_.fields()[layout_.fields()[f].field].divides == appended_[i].axis;
  }
  bool is_appended(size_t f, size_t i) const {
    return !appended_.empty() && appended_[i].axis != 0 && layout_.fields()[f].axis == appended_[i].axis;
  }
  std::optional<AppendedPieces> chain_of(size_t i) const {
    if (appended_.empty() || appended_[i].axis == 0) return std::nullopt;
    return std::optional<AppendedPieces>(std::in_place, store_, task_, appended_[i]);
  }
  bool flat(size_t f) const { return from_[f]->runs.size() == 1; }
  const std::byte* run(size_t f, size_t i) const {
    return flat(f) ? from_[f]->runs[0] + passed_[f].first : from_[f]->runs[i];
  }
  const uint32_t* run_sizes(size_t f, size_t i) const {
    return flat(f) ? from_[f]->sizes[0] + passed_[f].second : from_[f]->sizes[i];
  }

  void check_lengths(const TaskRow& row, size_t i) const {
    for (size_t f = 0; f < layout_.fields().size(); ++f) {
      const SpanField& field = layout_.fields()[f];
      if (is_appended(f, i) || divides_appended(f, i)) continue;
      if (from_[f] == nullptr) {
        fail(ErrorKind::schema, "field '", name(field.field), "' is missing: all fields are written together");
      }
      if (f >= layout_.arrays() && from_[f]->sizes.size() != from_[f]->runs.size()) {
        fail(ErrorKind::schema, "field '", name(field.field), "' has strings, of which each has a size");
      }
      const uint8_t divides = store_.fields()[field.field].divides;
      if (divides == 0) continue;
      const auto* const values = reinterpret_cast<const int32_t*>(run(f, i));
      uint64_t sum = 0;
      for (uint64_t k = 0; k < field.items(row.lengths); ++k) {
        int32_t part = 0;
        std::memcpy(&part, values + k, sizeof part);
        if (part < 0) fail(ErrorKind::schema, "field '", name(field.field), "' has lengths, found ", part);
        sum += static_cast<uint64_t>(part);
      }
      if (sum != row.lengths[divides - 1]) {
        fail(ErrorKind::schema, "field '", name(field.field), "' of row ", i, " adds up to ", sum, ", the row has ",
             row.lengths[divides - 1], " ", store_.tasks()->described().axes[divides - 1].name);
      }
    }
  }

  void measure(const TaskRow& row, size_t i, const std::optional<AppendedPieces>& chain) {
    for (size_t f = layout_.arrays(); f < layout_.fields().size(); ++f) {
      uint64_t& bytes = string_bytes_[f - layout_.arrays()];
      if (is_appended(f, i)) {
        bytes = chain->bytes(chain->index_of(layout_.fields()[f].field));
        continue;
      }
      bytes = sum_of(run_sizes(f, i), layout_.fields()[f].items(row.lengths));
    }
  }
  static uint64_t sum_of(const uint32_t* sizes, uint64_t count) {
    uint64_t sum = 0;
    for (uint64_t k = 0; k < count; ++k) sum += sizes[k];
    return sum;
  }

  // Behind the row's values in the flat runs.
  void pass(const TaskRow& row, size_t i) {
    for (size_t f = 0; f < layout_.fields().size(); ++f) {
      if (from_[f] == nullptr || !flat(f)) continue;
      const SpanField& field = layout_.fields()[f];
      const uint64_t items = field.items(row.lengths);
      if (f < layout_.arrays()) {
        passed_[f].first += items * field.item_bytes;
      } else {
        passed_[f].first += sum_of(run_sizes(f, i), items);
        passed_[f].second += items;
      }
    }
  }

  static void fill_strings(std::byte* to, uint64_t items, const uint32_t* sizes, const std::byte* text, uint64_t bytes,
                           bool stream) {
    std::vector<uint32_t> bounds(items + 1);
    for (uint64_t k = 0; k < items; ++k) bounds[k + 1] = bounds[k] + sizes[k];
    copy_block(to, bounds.data(), 4 * (items + 1), false);
    copy_block(to + 4 * (items + 1), text, bytes, stream);
  }

  void fill_appended(size_t f, const AppendedPieces& chain, std::byte* to, uint64_t items, bool stream) const {
    const size_t its = chain.index_of(layout_.fields()[f].field);
    const bool strings = f >= layout_.arrays();
    std::vector<uint32_t> bounds(strings ? 1 : 0);
    std::byte* at = to + (strings ? 4 * (items + 1) : 0);
    uint64_t before = 0;
    chain.for_each(its, [&](const std::byte* from, uint64_t bytes, uint32_t count, const std::byte* starts) {
      for_each_bound(starts, count, bytes, [&](uint32_t k, uint64_t bound) {
        if (k != 0) bounds.push_back(static_cast<uint32_t>(before + bound));
      });
      if (count != 0) bounds.push_back(static_cast<uint32_t>(before + bytes));
      copy_block(at, from, bytes, stream);
      at += bytes;
      before += bytes;
    });
    if (!strings) return;
    bounds.resize(items + 1, static_cast<uint32_t>(before));
    copy_block(to, bounds.data(), 4 * (items + 1), false);
  }

  const Store& store_;
  uint32_t task_;
  std::span<const Appended> appended_;
  SpanLayout layout_;
  std::vector<const PackedSource*> from_;  // of each field
  std::vector<uint64_t> string_bytes_;
  std::vector<SpanPiece> pieces_;
  std::vector<std::pair<uint64_t, uint64_t>> passed_;  // of each field that is flat: bytes and strings of earlier rows
};

}  // namespace

Appended merge_appended(Store& store, uint32_t task, TaskRow& row, std::optional<std::span<const int32_t>> given) {
  Tasks& tasks = *store.tasks();
  Appended made;
  made.parts = tasks.chain(task, {row.row, row.generation, row.claim});
  if (made.parts.empty()) return made;
  made.axis = made.parts.front().axis;
  std::ranges::stable_sort(made.parts, {}, &ChainPart::item);
  const AxisRecord& axis = tasks.described().axes[made.axis - 1];
  uint64_t total = 0;
  std::vector<uint64_t> items;
  std::vector<uint8_t> seen;
  for (const ChainPart& part : made.parts) {
    if (part.axis != made.axis)
      fail(ErrorKind::corrupt, "row ", row.row, " has had appended what has no axis in common");
    const uint64_t its = part.lengths[made.axis - 1];
    total += its;
    if (axis.divided == 0) continue;
    if (part.item >= kMostItems)
      fail(ErrorKind::schema, "item ", part.item, " was appended, the last one is ", kMostItems - 1);
    if (part.item >= items.size()) items.resize(part.item + 1), seen.resize(part.item + 1);
    items[part.item] += its;
    seen[part.item] = 1;
  }
  if (total > INT32_MAX)
    fail(ErrorKind::schema, "row ", row.row, " has ", total, " ", axis.name, ", more than 32 bits count");
  row.lengths[made.axis - 1] = static_cast<uint32_t>(total);
  if (axis.divided == 0) return made;
  const FieldRecord& divider = store.fields()[axis.divided - 1];
  const char* const by = tasks.described().axes[divider.axis - 1].name;
  if (given) {
    if (given->size() < items.size()) {
      fail(ErrorKind::schema, "field '", divider.name, "' has ", given->size(), " ", by,
           ", something was appended to number ", items.size() - 1);
    }
    items.resize(given->size()), seen.resize(given->size());
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (given && (*given)[i] != static_cast<int64_t>(items[i])) {
      fail(ErrorKind::schema, "field '", divider.name, "' says that number ", i, " of the ", by, " has ", (*given)[i],
           " ", axis.name, ", ", items[i], " were appended to it");
    }
    if (!given && seen[i] == 0) {
      fail(ErrorKind::schema, "nothing was appended to number ", i, " of the ", by, "; give '", divider.name,
           "' with 0 for it if it has none");
    }
    made.lengths.push_back(static_cast<int32_t>(items[i]));
  }
  row.lengths[divider.axis - 1] = static_cast<uint32_t>(items.size());
  return made;
}

void size_spans(const Store& store, uint32_t task, uint8_t axis, std::span<TaskRow> rows,
                std::span<const PackedSource> sources, std::span<const Appended> appended) {
  SpanWriter writer(store, task, axis, rows.size(), sources, appended);
  for (size_t i = 0; i < rows.size(); ++i) writer.size(rows[i], i);
}

void fill_spans(const Store& store, uint32_t task, uint8_t axis, std::span<const TaskRow> rows,
                std::span<const PackedSource> sources, std::span<const Appended> appended, unsigned threads) {
  SpanWriter first(store, task, axis, rows.size(), sources, appended);
  const std::vector<SpanWriter::Place> places = first.places(rows);
  uint64_t bytes = 0;
  for (const TaskRow& each : rows) bytes += each.span == 0 ? 0 : each.units * kSpanUnit;
  // A store larger than any cache: the spans are cold, and their next reader will find them in memory.
  const bool stream = bytes >= stream_from() || store.header().regions[kSpansRegion].bytes >= kColdSpans;
  run_in_pieces(rows.size(), bytes, threads, [&](size_t from, size_t to) {
    SpanWriter writer(first);
    for (size_t i = from; i < to; ++i) {
      if (rows[i].span != 0) writer.fill(rows[i], i, places[i], stream);
    }
    if (stream) stream_fence();
  });
}

void copy_appended(const Store& store, uint32_t task, const Appended& appended, uint32_t field,
                   std::vector<uint8_t>* to, std::vector<uint32_t>* sizes) {
  if (appended.axis == 0) return;
  const AppendedPieces chain(store, task, appended);
  const size_t f = chain.index_of(field);
  if (f == chain.fields()) fail(ErrorKind::schema, "field number ", field, " is not one that was appended");
  chain.for_each(f, [&](const std::byte* from, uint64_t bytes, uint32_t count, const std::byte* starts) {
    const size_t at = to->size();
    to->resize(at + bytes);
    copy_block(to->data() + at, from, bytes, false);
    if (sizes == nullptr || count == 0) return;
    uint64_t before = 0;
    for_each_bound(starts, count, bytes, [&](uint32_t k, uint64_t bound) {
      if (k != 0) sizes->push_back(static_cast<uint32_t>(bound - before));
      before = bound;
    });
    sizes->push_back(static_cast<uint32_t>(bytes - before));
  });
}

}  // namespace geartrain
