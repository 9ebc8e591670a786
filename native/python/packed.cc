// Binding of packed rows (fetch/packed.h): values of rows one behind the other in pooled memory, with the bounds of
// rows and of the parts that an axis is divided into.

#include "fetch/packed.h"

#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "base/errors.h"
#include "python/bind.h"
#include "python/packed_rows.h"

namespace geartrain {
namespace {

class PackedArrays {
 public:
  PackedArrays(std::shared_ptr<const PackedKind> kind, PackedRows rows, std::unique_ptr<PooledMemory> memory)
      : kind_(std::move(kind)), rows_(std::move(rows)), memory_(std::move(memory)) {}

  size_t size() const { return rows_.size(); }
  uint64_t nbytes() const { return rows_.nbytes(); }

  // (items of all rows, ...); of strings their text.
  nb::object field(size_t i) const {
    check_field(i);
    const PackedRows::FieldValues& values = rows_.field(i);
    const PackedKind::Field& field = kind_->fields[i];
    if (is_strings(i)) return memory_->array(values.at, {values.bytes}, nb::dtype<uint8_t>());
    std::vector<size_t> shape{values.items};
    shape.insert(shape.end(), field.item_shape.begin(), field.item_shape.end());
    return memory_->array(values.at, shape, field.dtype);
  }
  // A list of str or bytes.
  nb::list strings(size_t i) const {
    check_field(i);
    if (!is_strings(i)) fail(ErrorKind::schema, "field ", i, " has no strings");
    const PackedRows::FieldValues& values = rows_.field(i);
    const auto* const text = reinterpret_cast<const char*>(values.at);
    const bool decoded = kind_->plan.fields()[i].kind == SpanKind::text;
    nb::list made;
    for (uint64_t k = 0; k < values.items; ++k) {
      const int64_t from = values.bounds[k];
      const auto bytes = static_cast<Py_ssize_t>(values.bounds[k + 1] - from);
      PyObject* const one =
          decoded ? PyUnicode_DecodeUTF8(text + from, bytes, nullptr) : PyBytes_FromStringAndSize(text + from, bytes);
      if (one == nullptr) throw nb::python_error();
      made.append(nb::steal(one));
    }
    return made;
  }
  // Where the text of each string begins in `field`, and the last one's ends: (items + 1,).
  nb::object string_bounds(size_t i) const {
    check_field(i);
    if (!is_strings(i)) fail(ErrorKind::schema, "field ", i, " has no strings");
    const PackedRows::FieldValues& values = rows_.field(i);
    return memory_->array(values.bounds, {values.bounds.size()});
  }
  // Of an axis by its number: (lengths (n,), where rows begin (n + 1,), where parts begin or None), int32.
  nb::tuple axis(uint32_t number) const {
    const auto& axes = kind_->plan.axes();
    for (size_t a = 0; a < axes.size(); ++a) {
      if (axes[a].number != number) continue;
      const PackedRows::AxisLengths32& told = rows_.axis(a);
      return nb::make_tuple(array(told.lengths), array(told.bounds),
                            axes[a].divider == PackedPlan::kNone ? nb::none() : array(told.parts));
    }
    fail(ErrorKind::schema, "these rows have no axis number ", number);
  }
  nb::object torn() const { return to_numpy(std::vector<uint8_t>(rows_.torn().begin(), rows_.torn().end())); }
  nb::object unready() const { return to_numpy(std::vector<uint8_t>(rows_.unready().begin(), rows_.unready().end())); }
  nb::object versions() const {
    return to_numpy(std::vector<int64_t>(rows_.versions().begin(), rows_.versions().end()));
  }

 private:
  void check_field(size_t i) const {
    if (i >= kind_->fields.size()) {
      fail(ErrorKind::schema, "these rows have ", kind_->fields.size(), " fields, not a number ", i);
    }
  }
  bool is_strings(size_t i) const { return kind_->plan.fields()[i].kind != SpanKind::array; }
  nb::object array(std::span<int32_t> values) const { return memory_->array(values, {values.size()}); }

  std::shared_ptr<const PackedKind> kind_;
  PackedRows rows_;
  std::unique_ptr<PooledMemory> memory_;
};

// Of some fields of a store, which outlives it.
class PackedReader {
 public:
  PackedReader(const Store& store, const std::vector<uint32_t>& fields, const std::vector<uint32_t>& axes,
               unsigned threads)
      : store_(store), threads_(threads) {
    kind_ = entered(store, [&] { return std::make_shared<const PackedKind>(store, fields, axes); });
  }

  PackedArrays read(const In<uint32_t>& rows, const In<uint32_t>& generations) const {
    PackedRows read(kind_->plan, view(rows), view(generations));
    std::unique_ptr<PooledMemory> memory;
    released(store_, [&] {
      read.read(
          [&](size_t bytes) {
            memory = std::make_unique<PooledMemory>(std::max<size_t>(bytes, kBlockAlignment));
            return memory->base();
          },
          threads_);
    });
    return {kind_, std::move(read), std::move(memory)};
  }
  std::unique_ptr<PackedTransfer> transfer() const { return std::make_unique<PackedTransfer>(kind_, threads_); }

 private:
  const Store& store_;
  unsigned threads_;
  std::shared_ptr<const PackedKind> kind_;
};

}  // namespace

void bind_packed(nb::module_& module) {
  nb::class_<PackedArrays>(module, "PackedArrays")
      .def("__len__", &PackedArrays::size)
      .def_prop_ro("nbytes", &PackedArrays::nbytes)
      .def("field", &PackedArrays::field)
      .def("strings", &PackedArrays::strings)
      .def("string_bounds", &PackedArrays::string_bounds)
      .def("axis", &PackedArrays::axis)
      .def("torn", &PackedArrays::torn)
      .def("unready", &PackedArrays::unready)
      .def("versions", &PackedArrays::versions);
  nb::class_<PackedTransfer>(module, "PackedTransfer").def("taken", [](PackedTransfer& transfer) {
    auto [rows, memory] = transfer.taken();
    return PackedArrays(transfer.kind(), std::move(rows), std::move(memory));
  });
  nb::class_<PackedReader>(module, "PackedReader")
      .def(nb::init<const Store&, const std::vector<uint32_t>&, const std::vector<uint32_t>&, unsigned>(),
           nb::arg("store"), nb::arg("fields"), nb::arg("axes"), nb::arg("threads"), nb::keep_alive<1, 2>())
      .def("read", &PackedReader::read, nb::arg("rows"), nb::arg("generations"))
      .def("transfer", &PackedReader::transfer, nb::keep_alive<0, 1>());
}

}  // namespace geartrain
