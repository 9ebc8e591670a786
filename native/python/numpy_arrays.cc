#include "python/numpy_arrays.h"

#include <cstdint>

#include "base/errors.h"

namespace geartrain {
namespace {

// Places in the table (numpy/__multiarray_api.h), and numbers of types and flags (numpy/ndarraytypes.h).
constexpr size_t kArrayType = 2, kDescrFromType = 45, kNewFromDescr = 94, kSetBaseObject = 282;
constexpr int kContiguous = 0x1, kAligned = 0x100, kWriteable = 0x400;
constexpr size_t kMostAligned = 16;

int number_of(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  static_assert(sizeof(long) == 8, "NumPy's numbers of 64-bit integers are those of long");
  const auto by_size = [&](int one, int two, int four, int eight) {
    return dtype.bits == 8 ? one : dtype.bits == 16 ? two : dtype.bits == 32 ? four : dtype.bits == 64 ? eight : -1;
  };
  switch (static_cast<Code>(dtype.code)) {
    case Code::Bool:
      return by_size(0, -1, -1, -1);
    case Code::Int:
      return by_size(1, 3, 5, 7);
    case Code::UInt:
      return by_size(2, 4, 6, 8);
    case Code::Float:
      return by_size(-1, 23, 11, 12);
    case Code::Complex:
      return dtype.bits == 64 ? 14 : dtype.bits == 128 ? 15 : -1;
    default:
      return -1;
  }
}

}  // namespace

NumpyArrays::NumpyArrays() {
  nb::object multiarray;
  try {
    multiarray = nb::module_::import_("numpy._core._multiarray_umath");
  } catch (const nb::python_error& missing) {
    if (!missing.matches(PyExc_ImportError)) throw;
    multiarray = nb::module_::import_("numpy.core._multiarray_umath");  // before NumPy 2
  }
  const nb::object table = multiarray.attr("_ARRAY_API");
  api_ = static_cast<void**>(PyCapsule_GetPointer(table.ptr(), nullptr));
  if (api_ == nullptr) throw nb::python_error();
}

nb::object NumpyArrays::make(std::byte* data, const std::vector<size_t>& shape, nb::dlpack::dtype dtype,
                             std::shared_ptr<void> owner) const {
  using Descr = PyObject* (*)(int);
  using New = PyObject* (*)(PyTypeObject*, PyObject*, int, const Py_ssize_t*, const Py_ssize_t*, void*, int, PyObject*);
  using SetBase = int (*)(PyObject*, PyObject*);
  const int number = number_of(dtype);
  if (number < 0)
    fail(ErrorKind::schema, "NumPy has no dtype of code ", int{dtype.code}, " and ", int{dtype.bits}, " bits");
  PyObject* descr = reinterpret_cast<Descr>(api_[kDescrFromType])(number);
  if (descr == nullptr) throw nb::python_error();
  const bool aligned = reinterpret_cast<uintptr_t>(data) % kMostAligned == 0;
  // Without data it makes an array of its own, whose flags say the order; with strides, it looks at the alignment.
  Py_ssize_t strides[64];
  if (!aligned) {
    Py_ssize_t stride = dtype.bits / 8;
    for (size_t i = shape.size(); i-- != 0;) {
      strides[i] = stride;
      stride *= static_cast<Py_ssize_t>(shape[i]);
    }
  }
  PyObject* made = reinterpret_cast<New>(api_[kNewFromDescr])(
      static_cast<PyTypeObject*>(api_[kArrayType]), descr, static_cast<int>(shape.size()),
      reinterpret_cast<const Py_ssize_t*>(shape.data()), aligned || data == nullptr ? nullptr : strides, data,
      data == nullptr ? 0 : kContiguous | kWriteable | (aligned ? kAligned : 0), nullptr);  // takes the descr
  if (made == nullptr) throw nb::python_error();
  nb::object array = nb::steal(made);
  if (data == nullptr) return array;
  nb::capsule keep(new std::shared_ptr<void>(std::move(owner)),
                   [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
  if (reinterpret_cast<SetBase>(api_[kSetBaseObject])(made, keep.release().ptr()) != 0) throw nb::python_error();
  return array;
}

}  // namespace geartrain
