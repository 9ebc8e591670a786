#include "segment/segment.h"

#include <algorithm>
#include <cstring>

#include "base/convert.h"
#include "base/errors.h"
#include "segment/sum_tree.h"

namespace geartrain {
namespace {

constexpr uint64_t round_up(uint64_t value, uint64_t to) {
  return (value + to - 1) / to * to;
}

class Fingerprint {  // FNV-1a, 64 bits
 public:
  template <typename T>
  void add(const T& value) {
    unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    for (unsigned char byte : bytes) hash_ = (hash_ ^ byte) * 0x100000001b3u;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

FieldRecord record_of(const FieldSpec& field, uint64_t offset) {
  FieldRecord record{};
  std::memcpy(record.name, field.name.data(), field.name.size());
  record.dtype = field.dtype;
  record.itemsize = field.itemsize;
  record.timed = field.timed;
  record.ndim = static_cast<uint8_t>(field.shape.size());
  record.block_bytes = field.itemsize;
  for (size_t i = 0; i < field.shape.size(); ++i) {
    record.shape[i] = field.shape[i];
    if (__builtin_mul_overflow(record.block_bytes, uint64_t{field.shape[i]}, &record.block_bytes)) {
      fail(ErrorKind::schema, "field '", field.name, "' is larger than memory can be");
    }
  }
  record.stride = round_up(record.block_bytes, kBlockAlignment);
  record.offset = offset;
  return record;
}

void check_spec(const FieldSpec& field) {
  if (field.name.empty() || field.name.size() > kMaxNameBytes) {
    fail(ErrorKind::schema, "a field's name has 1 to ", kMaxNameBytes, " bytes, '", field.name, "' has ",
         field.name.size());
  }
  if (field.shape.size() > kMaxDims || field.itemsize == 0 || (field.timed && field.shape.empty()) ||
      std::count(field.shape.begin(), field.shape.end(), 0u) > 0) {
    fail(ErrorKind::schema, "field '", field.name, "' has no possible shape or element size");
  }
}

}  // namespace

Header plan_segment(const std::vector<FieldSpec>& fields, const StoreOptions& options,
                    std::vector<FieldRecord>* records) {
  if (options.capacity == 0) fail(ErrorKind::schema, "a store needs room for at least one row, capacity is 0");
  if (options.capacity > kMaxRows) {
    fail(ErrorKind::schema, "a shard has at most ", kMaxRows, " rows, capacity is ", options.capacity);
  }
  if (options.max_rows > options.capacity) {
    fail(ErrorKind::schema, "max_rows is ", options.max_rows, ", more than the capacity of ", options.capacity);
  }
  if (options.priority_fraction_bits > 32) {
    fail(ErrorKind::schema, "priority_fraction_bits is 0 to 32, found ", options.priority_fraction_bits);
  }
  if (fields.empty() || fields.size() > kMaxFields) {
    fail(ErrorKind::schema, "a store has 1 to ", kMaxFields, " fields, found ", fields.size());
  }
  if (options.remover == Remover::lowest_value || options.remover == Remover::highest_value) {
    if (options.remover_field >= fields.size()) fail(ErrorKind::schema, "the remover goes by a field that is none");
    const FieldSpec& field = fields[options.remover_field];
    if (field.timed || !field.shape.empty() || conversion(field.dtype, 13) == nullptr) {
      fail(ErrorKind::schema, "the remover goes by one number a row, of integers, float32 or float64; '", field.name,
           "' is something else");
    }
  } else if (options.remover_field != 0) {
    fail(ErrorKind::schema, "this remover goes by no field");
  }
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.format_version = kFormatVersion;
  header.header_bytes = sizeof(Header);
  header.capacity = options.capacity;
  header.max_rows = options.max_rows == 0 ? options.capacity : options.max_rows;
  header.max_age_ns = options.max_age_ns;
  header.max_times_sampled = options.max_times_sampled;
  header.priority_fraction_bits = options.priority_fraction_bits;
  header.remover = static_cast<uint32_t>(options.remover) | options.remover_field << 8;
  if (options.content_numbers) header.required_features |= kContentNumbers;
  if (options.max_priority) header.required_features |= kMaxPriority;
  header.persist = options.persist;
  header.max_clients = kMaxClients;
  header.fanout = kFanout;
  header.field_count = static_cast<uint32_t>(fields.size());

  uint64_t end = kRegionsOffset;
  const auto place = [&](RegionId id, uint64_t bytes) {
    header.regions[id] = {end, bytes};
    end = round_up(end + bytes, 4096);
  };
  const uint64_t rows = options.capacity;
  header.max_length = 1;
  for (const FieldSpec& field : fields) {
    if (field.timed && !field.shape.empty()) header.max_length = std::max(field.shape[0], 1u);
  }
  const uint64_t bit_words = (rows + 63) / 64;
  place(kStatusRegion, rows * sizeof(RowStatus));
  place(kWordsRegion, padded_leaves(rows) * 8);
  place(kPriorityNodesRegion, TreeShape::of(rows).nodes * 8);
  place(kBitsRegion, padded_leaves(bit_words) * 8);
  place(kBitNodesRegion, TreeShape::of(bit_words).nodes * 8);
  place(kHeapRegion, options.remover == Remover::lowest_priority ? rows * 4 : 0);
  if (options.step_priorities) {
    // So many that their numbers have 32 bits, and the sum of all priorities 64.
    const uint64_t steps = rows * header.max_length;
    if (steps > kMaxRows) {
      fail(ErrorKind::schema, "a shard with priorities of steps has at most ", kMaxRows, " of them, ", rows,
           " rows of ", header.max_length, " steps have ", steps);
    }
    if (options.remover == Remover::lowest_priority) {
      fail(ErrorKind::schema, "with priorities of steps no row has one that the remover could go by");
    }
    header.required_features |= kStepPriorities;
    place(kStepWordsRegion, padded_leaves(steps) * 8);
    place(kStepNodesRegion, TreeShape::of(steps).nodes * 8);
    place(kStepJournalsRegion, kJournals * sizeof(StepJournal));
  }

  const uint64_t columns_start = end;
  records->clear();
  bool timed_seen = false;
  for (const FieldSpec& field : fields) {
    check_spec(field);
    for (const FieldRecord& other : *records) {
      if (field.name == other.name) fail(ErrorKind::schema, "field '", field.name, "' is named twice");
    }
    if (field.timed) {
      if (timed_seen && header.max_length != field.shape[0]) {
        fail(ErrorKind::schema, "timed fields must share their first axis, found ", header.max_length, " and ",
             field.shape[0]);
      }
      header.max_length = field.shape[0];
      timed_seen = true;
    }
    FieldRecord record = record_of(field, end);
    uint64_t column_bytes = 0;
    if (__builtin_mul_overflow(record.stride, rows, &column_bytes) || column_bytes > (uint64_t{1} << 60) - end) {
      fail(ErrorKind::schema, "field '", field.name, "' times ", rows, " rows is larger than memory can be");
    }
    records->push_back(record);
    end = round_up(end + column_bytes, 4096);
  }
  header.regions[kColumnsRegion] = {columns_start, end - columns_start};
  header.segment_bytes = end;
  header.fingerprint = layout_fingerprint(header, records->data());
  return header;
}

uint64_t layout_fingerprint(const Header& header, const FieldRecord* records) {
  Header plain = header;
  plain.fingerprint = 0;
  plain.created_ns = 0;
  plain.store_id = 0;
  Fingerprint fingerprint;
  for (uint64_t size : {sizeof(Header), sizeof(Control), sizeof(pthread_mutex_t), sizeof(FieldRecord), sizeof(Client),
                        sizeof(RowStatus)}) {
    fingerprint.add(size);
  }
  fingerprint.add(plain);
  for (uint32_t i = 0; i < header.field_count; ++i) fingerprint.add(records[i]);
  return fingerprint.value();
}

uint64_t rows_within(const std::vector<FieldSpec>& fields, StoreOptions options, uint64_t bytes) {
  std::vector<FieldRecord> records;
  const auto taken = [&](uint64_t rows) {
    options.capacity = rows;
    options.max_rows = 0;
    return plan_segment(fields, options, &records).segment_bytes;
  };
  if (taken(1) > bytes) return 0;
  // More rows never take fewer bytes. A row takes at least one block.
  uint64_t fits = 1, beyond = std::min(kMaxRows, bytes / kBlockAlignment) + 1;
  while (beyond - fits > 1) {
    const uint64_t middle = fits + (beyond - fits) / 2;
    bool enough = false;
    try {
      enough = taken(middle) <= bytes;
    } catch (const Error&) {
      // larger than memory can be
    }
    (enough ? fits : beyond) = middle;
  }
  return fits;
}

}  // namespace geartrain
