// HostArray: an array of host memory by Python's buffer protocol, without a copy and without an exception.
//
// NumPy's arrays and scalars have that protocol, and it is several times faster than DLPack; torch's tensors do not.
// Made and destroyed with the GIL, read without it.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace geartrain {

class HostArray {
 public:
  HostArray() { view_.obj = nullptr; }
  ~HostArray() { release(); }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;

  // False, and no Python error set, for what is no C-contiguous array of a dtype that a store can hold by itself, and
  // for masked arrays, whose buffer is what they hide.
  bool open(PyObject* object) {
    release();
    if (PyObject_CheckBuffer(object) == 0 || is_masked(object)) return false;
    if (PyObject_GetBuffer(object, &view_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
      view_.obj = nullptr;
      PyErr_Clear();
      return false;
    }
    code_ = code_of(view_.format, view_.itemsize);
    if (code_ != 0 && PyBuffer_IsContiguous(&view_, 'C') != 0) return true;
    release();
    return false;
  }

  void close() { release(); }
  const std::byte* data() const { return static_cast<const std::byte*>(view_.buf); }
  size_t bytes() const { return static_cast<size_t>(view_.len); }
  // The stored code of the dtype (geartrain/core/dtypes.py).
  uint8_t code() const { return code_; }
  std::span<const Py_ssize_t> shape() const { return {view_.shape, static_cast<size_t>(view_.ndim)}; }

 private:
  // Whether it is one of numpy.ma's, which alone can be filled. The first type that is none is kept, and is ndarray in
  // general: one look-up of an attribute takes longer than all else here.
  static bool is_masked(PyObject* object) {
    static PyTypeObject* plain = nullptr;
    PyTypeObject* type = Py_TYPE(object);
    if (type == plain) return false;
    if (PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), "filled") != 0) return true;
    if (plain == nullptr) {
      Py_INCREF(reinterpret_cast<PyObject*>(type));
      plain = type;
    }
    return false;
  }

  void release() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);  // which clears it
  }

  // Of a format of the struct module in this machine's byte order; 0 for any other.
  static uint8_t code_of(const char* format, Py_ssize_t size) {
    if (format == nullptr) return 2;  // plain bytes
    if (*format == '@' || *format == '=') ++format;
    const bool complex = *format == 'Z';
    if (complex) ++format;
    if (format[0] == '\0' || format[1] != '\0') return 0;
    switch (*format) {
      case '?':
        return 1;
      case 'b':
      case 'h':
      case 'i':
      case 'l':
      case 'q':
        return of_size(size, 3, 5, 7, 9);
      case 'B':
      case 'H':
      case 'I':
      case 'L':
      case 'Q':
        return of_size(size, 2, 4, 6, 8);
      case 'e':
        return 10;
      case 'f':
        return complex ? 15 : 12;
      case 'd':
        return complex ? 16 : 13;
      default:
        return 0;
    }
  }
  static uint8_t of_size(Py_ssize_t size, uint8_t one, uint8_t two, uint8_t four, uint8_t eight) {
    return size == 1 ? one : size == 2 ? two : size == 4 ? four : size == 8 ? eight : 0;
  }

  Py_buffer view_;
  uint8_t code_ = 0;
};

}  // namespace geartrain
