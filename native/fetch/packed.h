// Packed rows: the values of some rows, field after field, one row's behind the other's and without padding; and the
// same way back, into spans.
//
//   PackedPlan plan(store, {ids, reward, text});                      // once
//   PackedRows batch(plan, rows, generations);
//   batch.read(room, threads);                                        // asks `room` for memory of the size it finds
//   batch.field(0).at                                                 // (items of all rows, ...)
//
//   size_spans(store, task, 0, rows, sources, {});                    // TaskRow::units, from lengths and sources
//   tasks.begin(Write::put, task, rows);
//   fill_spans(store, task, 0, rows, sources, {}, threads);
//   tasks.finish(Write::put, task, rows);
//
// Reading takes no lock. The words of a row and of its tasks are read, then the heads of its spans, then the bytes,
// then the words again: rows whose words differ are read again while their key holds. Nothing that is read from the
// segment is believed: a copy begins and ends inside of it, whatever stands there.
//
// Threads: any, each with objects of its own. Cost: one memcpy a field and row, and a few cache lines a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "fetch/copier.h"
#include "store/store.h"
#include "store/tasks.h"

namespace geartrain {

// --- reading ------------------------------------------------------------------------------------------------------

// What is read of rows. The store outlives it.
class PackedPlan {
 public:
  static constexpr uint32_t kColumn = 0xffffffffu;

  struct Field {
    uint32_t field;   // number in the schema
    uint32_t source;  // index in sources(); kColumn: a column
    uint32_t piece;   // in the layout of its span
    uint32_t axis;    // index in axes(), or kNone
    uint64_t item_bytes;
    SpanKind kind;
  };
  struct Axis {
    uint8_t number;            // counted from 1
    uint32_t source;           // whose spans tell its lengths
    uint32_t divider = kNone;  // the piece that holds the lengths of its parts, in the same span
    uint32_t by = kNone;       // index in axes(): of its parts
  };
  static constexpr uint32_t kNone = 0xffffffffu;

  // `axes`, counted from 1, are told of beside those of the fields. Throws schema for numbers of none.
  PackedPlan(const Store& store, std::span<const uint32_t> fields, std::span<const uint32_t> axes = {});

  const Store& store() const { return store_; }
  const std::vector<Field>& fields() const { return fields_; }
  const std::vector<Axis>& axes() const { return axes_; }
  const std::vector<uint32_t>& sources() const { return sources_; }  // tasks, 0: the insert

 private:
  uint32_t source_of(uint32_t task);
  uint32_t axis_of(uint8_t number);

  const Store& store_;
  std::vector<Field> fields_;
  std::vector<Axis> axes_;
  std::vector<uint32_t> sources_;
};

class PackedRows {
 public:
  // Memory of so many bytes, at a multiple of 64, which stays as long as what is read there is used.
  using Room = std::function<std::byte*(size_t bytes)>;

  struct FieldValues {
    std::byte* at = nullptr;
    uint64_t items = 0, bytes = 0;
    std::span<int64_t> bounds = {};  // of strings: where each begins, and the last one ends
  };
  struct AxisLengths32 {
    std::span<int32_t> lengths;  // of each row
    std::span<int32_t> bounds;   // where each row begins, and the last one ends
    std::span<int32_t> parts;    // the same of the parts that the axis is divided into; empty: it is not
  };

  PackedRows(const PackedPlan& plan, std::span<const uint32_t> rows, std::span<const uint32_t> generations);

  // Returns how many rows are torn: their keys are stale, or they lack what is asked for (unready). Torn rows have no
  // items. Throws schema where an axis has more items than 32 bits count; turnover where rows change
  // faster than they can be read; corrupt.
  uint64_t read(const Room& room, unsigned threads);

  size_t size() const { return rows_.size(); }
  uint64_t nbytes() const { return nbytes_; }  // of the fields
  const PackedPlan& plan() const { return *plan_; }
  const FieldValues& field(size_t i) const { return values_[i]; }
  const AxisLengths32& axis(size_t i) const { return told_[i]; }
  std::span<const uint32_t> rows() const { return rows_; }
  std::span<const uint32_t> generations() const { return generations_; }
  std::span<const uint8_t> torn() const { return torn_; }
  // Of torn rows whose keys hold: a task whose fields are asked for and that is not done for the row, plus 1.
  std::span<const uint8_t> unready() const { return unready_; }
  std::span<const int64_t> versions() const { return versions_; }

 private:
  // Values of one field and row in the segment.
  struct Piece {
    const std::byte* from = nullptr;
    uint64_t bytes = 0;    // of strings: of their text
    uint32_t strings = 0;  // how many; their bounds lie before them
  };
  enum class Found : uint8_t { whole, stale, unready, unsound };

  Found locate(size_t i);
  Found locate_soundly(size_t i);
  void locate_all();
  bool holds(size_t i) const;
  size_t place();  // bytes of the buffer
  void bind(std::byte* base);
  void copy(unsigned threads) const;
  void copy_piece(size_t field, size_t i, bool stream) const;
  bool settle();
  bool copy_again(size_t i);
  Piece& piece(size_t field, size_t i) { return pieces_[i * plan_->fields().size() + field]; }
  const Piece& piece(size_t field, size_t i) const { return pieces_[i * plan_->fields().size() + field]; }

  const PackedPlan* plan_;
  std::vector<uint32_t> rows_, generations_;
  std::vector<uint8_t> torn_, unready_;
  std::vector<int64_t> versions_;
  std::vector<uint64_t> words_;                  // (rows, sources) as they were read first
  std::vector<Piece> pieces_;                    // (rows, fields)
  std::vector<uint32_t> lengths_;                // (rows, axes)
  std::vector<std::vector<int32_t>> parts_;      // of each axis that is divided: lengths of its parts, of all rows
  std::vector<std::vector<int32_t>> row_parts_;  // the same of the row that was located last
  std::vector<SpanPiece> located_;               // scratch
  std::vector<std::vector<uint64_t>> item_at_;   // of each axis: items before each row
  std::vector<std::vector<uint64_t>> text_at_;   // of each field of strings: bytes before each row
  struct Place {
    size_t values = 0, bounds = 0;
  };
  struct AxisPlace {
    size_t lengths = 0, bounds = 0, parts = 0;
  };
  std::vector<Place> places_;
  std::vector<AxisPlace> axis_places_;
  std::vector<FieldValues> values_;
  std::vector<AxisLengths32> told_;
  uint64_t nbytes_ = 0;
};

// Copies the rows of a replay's batch so, in the place of its fields (BatchSampler::begin, finish).
class PackedCopier final : public Copier {
 public:
  PackedCopier(const PackedPlan& plan, PackedRows::Room room, unsigned threads)
      : plan_(plan), room_(std::move(room)), threads_(threads), rows_(plan, {}, {}) {}

  void launch(const RowsToCopy& rows) override;
  CopiedRows resolve() override;
  bool copies_all() const override { return true; }
  const PackedRows& rows() const { return rows_; }

 private:
  const PackedPlan& plan_;
  PackedRows::Room room_;
  unsigned threads_;
  PackedRows rows_;
};

// --- writing ------------------------------------------------------------------------------------------------------

// Values of a field of the rows that are written: one run that has them one row's behind the other's, or a run for each
// row. A run of strings has their bytes, and one of `sizes` how many of these each string has.
struct PackedSource {
  uint32_t field;
  std::span<const std::byte* const> runs;
  std::span<const uint32_t* const> sizes = {};
};

// What was appended to a claimed row, in the order that its put has it: by item, and of an item as it came.
struct Appended {
  uint8_t axis = 0;  // counted from 1; 0: nothing was appended
  std::vector<ChainPart> parts;
  std::vector<int32_t> lengths;  // of each item, where a field divides the axis: its values
};

// Takes it, and sets the row's lengths that follow from it. `given`: values of the field that divides the axis, where
// the put says them; then an item that nothing was appended to has 0. Throws stale_claim; schema where an item is
// missing or what is given is not what was appended.
Appended merge_appended(Store& store, uint32_t task, TaskRow& row,
                        std::optional<std::span<const int32_t>> given = std::nullopt);

// Sets the units of rows' spans. `axis`: of an append. `appended`: of each row, or none. Throws schema where a field
// of the task is not given, or given twice; where strings of a row are too long; and where the values of a field that
// divides an axis do not add up to its length.
void size_spans(const Store& store, uint32_t task, uint8_t axis, std::span<TaskRow> rows,
                std::span<const PackedSource> sources, std::span<const Appended> appended);

// Copies values into spans that were sized so and begun. Rows with span 0 are passed over. `threads` 0: the default.
void fill_spans(const Store& store, uint32_t task, uint8_t axis, std::span<const TaskRow> rows,
                std::span<const PackedSource> sources, std::span<const Appended> appended, unsigned threads);

// Items of one field that were appended, of all parts in their order, behind what is in `to`: of strings their text,
// and behind what is in `sizes` how many bytes each of them has.
void copy_appended(const Store& store, uint32_t task, const Appended& appended, uint32_t field,
                   std::vector<uint8_t>* to, std::vector<uint32_t>* sizes = nullptr);

}  // namespace geartrain
