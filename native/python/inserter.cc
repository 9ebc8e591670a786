// Inserter: the whole of an insert in one call, for arguments that need no conversion.

#include <algorithm>
#include <array>
#include <vector>

#include "fetch/insert.h"
#include "python/bind.h"
#include "python/host_array.h"

namespace geartrain {
namespace {

// One store's schema, looked up once. Whatever is out of the ordinary (a tensor, another dtype, a wrong shape) is left
// to the caller, who converts it or says what is wrong with it.
class Inserter {
 public:
  Inserter(Store& store, const nb::list& names) : store_(store), names_(all_interned(names)) {}

  // Inserts the rows of a dict of NumPy arrays. Returns their keys, row numbers and then generations as uint32; or
  // None, with nothing done, for arguments that it does not take.
  nb::object insert(nb::handle fields, unsigned threads) {
    sleep_at_finalization();
    const size_t count = names_.size();
    if (PyDict_CheckExact(fields.ptr()) == 0 || static_cast<size_t>(PyDict_GET_SIZE(fields.ptr())) != count) {
      return nb::none();
    }
    if (store_.is_closed()) return nb::none();  // and its file may be truncated
    if (store_.control().limiter.enabled.load(std::memory_order_relaxed) != 0) return nb::none();
    std::array<HostArray, kMaxFields> arrays;
    std::array<InsertField, kMaxFields> sources;
    size_t n = 0;
    size_t steps = 0;
    for (size_t f = 0; f < count; ++f) {
      PyObject* value = PyDict_GetItemWithError(fields.ptr(), names_[f].ptr());
      if (value == nullptr) {
        PyErr_Clear();
        return nb::none();
      }
      if (!arrays[f].open(value) || !fits(f, arrays[f], &n, &steps)) return nb::none();
      sources[f] = {static_cast<uint32_t>(f), arrays[f].data(), arrays[f].bytes() / n};
    }
    constexpr size_t kFew = 64;  // rows whose lengths and keys need no allocation
    std::array<uint32_t, kFew> few;
    std::vector<uint32_t> many;
    std::span<uint32_t> lengths;
    if (steps != 0 && steps != store_.header().max_length) {
      if (n > kFew) many.resize(n);
      lengths = n > kFew ? std::span(many) : std::span(few).first(n);
      std::fill(lengths.begin(), lengths.end(), static_cast<uint32_t>(steps));
    }
    nb::object keys = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(8 * n)));
    if (!keys.is_valid()) throw nb::python_error();
    auto* out = reinterpret_cast<uint32_t*>(PyBytes_AS_STRING(keys.ptr()));
    released(store_, [&] {
      geartrain::insert(store_, std::span(sources).first(count), {lengths, {}, {}}, threads, {out, n}, {out + n, n});
    });
    return keys;
  }

 private:
  // Whether the array is (n, steps, ...) of the field's dtype, or (n, ...) where the field has no time.
  bool fits(size_t f, const HostArray& array, size_t* n, size_t* steps) const {
    const FieldRecord& field = store_.fields()[f];
    const auto shape = array.shape();
    if (array.code() != field.dtype || shape.size() != size_t{field.ndim} + 1 || shape[0] < 1) return false;
    if (*n != 0 && static_cast<size_t>(shape[0]) != *n) return false;
    *n = static_cast<size_t>(shape[0]);
    for (size_t axis = field.timed != 0; axis < field.ndim; ++axis) {
      if (static_cast<uint64_t>(shape[axis + 1]) != field.shape[axis]) return false;
    }
    if (field.timed != 0) {
      if (shape[1] < 1 || static_cast<uint64_t>(shape[1]) > field.shape[0]) return false;
      if (*steps != 0 && static_cast<size_t>(shape[1]) != *steps) return false;
      *steps = static_cast<size_t>(shape[1]);
    }
    return true;
  }

  Store& store_;
  std::vector<nb::object> names_;
};

}  // namespace

void bind_inserter(nb::module_& module) {
  nb::class_<Inserter>(module, "Inserter")
      .def(nb::init<Store&, const nb::list&>(), nb::keep_alive<1, 2>())
      .def("insert", &Inserter::insert);
}

}  // namespace geartrain
