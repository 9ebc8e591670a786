// Packed rows in pooled memory, for bindings that make them.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fetch/packed.h"
#include "python/bind.h"

namespace geartrain {

// What packed rows of a kind have in common.
struct PackedKind {
  struct Field {
    std::vector<size_t> item_shape;
    nb::dlpack::dtype dtype;
  };
  PackedKind(const Store& store, std::span<const uint32_t> numbers, std::span<const uint32_t> axes)
      : plan(store, numbers, axes) {
    for (const uint32_t number : numbers) {
      const FieldRecord& record = store.fields()[number];
      fields.push_back({{record.shape, record.shape + record.ndim}, array_dtype(record.dtype, record.itemsize)});
    }
  }

  PackedPlan plan;
  std::vector<Field> fields;
};

// Copies the rows of a replay's batch into pooled memory (Sampler::begin in batch.cc takes it for a transfer).
class PackedTransfer {
 public:
  PackedTransfer(std::shared_ptr<const PackedKind> kind, unsigned threads)
      : kind_(std::move(kind)),
        copier_(
            kind_->plan,
            [this](size_t bytes) {
              memory_ = std::make_unique<PooledMemory>(std::max<size_t>(bytes, kBlockAlignment));
              return memory_->base();
            },
            threads) {}
  PackedTransfer(const PackedTransfer&) = delete;
  PackedTransfer& operator=(const PackedTransfer&) = delete;

  PackedCopier& copier() { return copier_; }
  const std::shared_ptr<const PackedKind>& kind() const { return kind_; }
  // The rows that were copied last, once.
  std::pair<PackedRows, std::unique_ptr<PooledMemory>> taken() {
    if (memory_ == nullptr) fail(ErrorKind::schema, "no rows were copied");
    return {copier_.rows(), std::move(memory_)};
  }

 private:
  std::shared_ptr<const PackedKind> kind_;
  std::unique_ptr<PooledMemory> memory_;
  PackedCopier copier_;
};

}  // namespace geartrain
