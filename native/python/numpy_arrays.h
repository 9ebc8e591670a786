// NumPy arrays, made over memory of ours and looked at through NumPy's C interface: in a third of the time that the
// buffer protocol takes.
//
// The interface is a table of functions, whose places, and an array's first fields, are part of NumPy's ABI and have
// been the same since version 1.7. The table is taken from the module that is loaded, so that nothing of NumPy is
// needed to build this one.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "python/bind.h"

namespace geartrain {

class NumpyArrays {
 public:
  NumpyArrays();

  // A writable array, in C order, that keeps the owner. `data` may be unaligned.
  nb::object make(std::byte* data, const std::vector<size_t>& shape, nb::dlpack::dtype dtype,
                  std::shared_ptr<void> owner) const;

  // An array as it is now. Its fields, of an object of type numpy.ndarray.
  struct Fields {
    PyObject_HEAD;
    char* data;
    int axes;
    const Py_ssize_t* shape;
    const Py_ssize_t* strides;
    PyObject* base;
    PyObject* dtype;
    int flags;

    bool contiguous() const { return (flags & 0x1) != 0; }  // in C order
  };
  static const Fields& fields(nb::handle array) { return *reinterpret_cast<const Fields*>(array.ptr()); }

 private:
  void** api_;
};

}  // namespace geartrain
