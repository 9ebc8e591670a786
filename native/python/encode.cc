// Encoder of values into a header and buffers. codec.cc has the format.
//
// The GIL is held to the end, as by pickle: what is sent is a list or dict of one instant, though other threads go on
// changing it.

#include <nanobind/stl/string.h>

#include <cstring>

#include "python/codec.h"

namespace geartrain {
namespace {

constexpr size_t kInlineMost = 512;        // an array of up to so many bytes is inline
constexpr size_t kInlineBytesMost = 4096;  // and so are bytes
constexpr size_t kMostBuffers = 4096;

struct Writer {
  const CodecTypes& codec;
  Payload& payload;
  const bool pickle;

  template <typename T>
  void put(T number) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&number);
    payload.header.insert(payload.header.end(), bytes, bytes + sizeof number);
  }
  void tag(char which) { payload.header.push_back(static_cast<std::byte>(which)); }
  void raw(const void* data, size_t bytes) {
    const auto* begin = static_cast<const std::byte*>(data);
    payload.header.insert(payload.header.end(), begin, begin + bytes);
  }
  void count(size_t n) {
    if (n > 0xffffffffu) fail(ErrorKind::frame, "a container or string has 2^32 - 1 elements at most, found ", n);
    put(static_cast<uint32_t>(n));
  }

  void value(nb::handle object, uint32_t depth) {
    PyObject* o = object.ptr();
    if (depth > codec.max_depth) {
      fail(ErrorKind::frame, "containers are nested deeper than ", codec.max_depth, ", or contain themselves");
    }
    if (o == Py_None) return tag('N');
    if (o == Py_True) return tag('T');
    if (o == Py_False) return tag('F');
    if (PyLong_CheckExact(o)) return integer(o);
    if (PyFloat_CheckExact(o)) {
      tag('d');
      return put(PyFloat_AS_DOUBLE(o));
    }
    if (PyUnicode_CheckExact(o)) return string(o);
    if (PyTuple_CheckExact(o)) {
      tag('t');
      const Py_ssize_t n = PyTuple_GET_SIZE(o);
      count(static_cast<size_t>(n));
      for (Py_ssize_t i = 0; i < n; ++i) value(PyTuple_GET_ITEM(o, i), depth + 1);
      return;
    }
    if (PyList_CheckExact(o)) {
      tag('l');
      const size_t at = payload.header.size();
      count(0);
      uint32_t n = 0;
      for (; n < PyList_GET_SIZE(o); ++n) value(nb::borrow(PyList_GET_ITEM(o, n)), depth + 1);
      std::memcpy(payload.header.data() + at, &n, sizeof n);
      return;
    }
    if (PyDict_CheckExact(o)) return dict(o, depth);
    if (PyBytes_CheckExact(o)) return bytes(object, 'b', PyBytes_AS_STRING(o), PyBytes_GET_SIZE(o));
    if (Py_TYPE(o) == reinterpret_cast<PyTypeObject*>(codec.names.numpy_array.ptr())) return numpy(object, 'a');
    if (codec.torch_is_loaded() && is_instance(o, codec.names.torch_tensor)) {
      return tensor(object, depth);
    }
    rare(object, depth);
  }

  void integer(PyObject* o) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(o, &overflow);
    if (overflow == 0) {
      tag('i');
      return put(static_cast<int64_t>(number));
    }
    const nb::handle object(o);
    const auto n = nb::cast<size_t>(object.attr("bit_length")()) / 8 + 1;
    if (n > kMostIntBytes) fail(ErrorKind::frame, "an int has ", kMostIntBytes, " bytes at most, found ", n);
    const auto digits = nb::cast<nb::bytes>(object.attr("to_bytes")(n, "little", nb::arg("signed") = true));
    tag('I');
    count(n);
    raw(digits.c_str(), n);
  }

  void string(PyObject* o) {
    Py_ssize_t n = 0;
    const char* text = PyUnicode_AsUTF8AndSize(o, &n);
    if (text == nullptr) {
      PyErr_Clear();
      fail(ErrorKind::frame, "a str holds half a surrogate pair, and cannot be written as UTF-8");
    }
    tag('s');
    count(static_cast<size_t>(n));
    raw(text, static_cast<size_t>(n));
  }

  void dict(PyObject* o, uint32_t depth) {
    tag('m');
    const size_t at = payload.header.size();
    count(0);
    PyObject *key = nullptr, *item = nullptr;
    Py_ssize_t position = 0;
    uint32_t n = 0;
    while (PyDict_Next(o, &position, &key, &item)) {
      const nb::object held_key = nb::borrow(key), held_item = nb::borrow(item);
      value(held_key, depth + 1);
      value(held_item, depth + 1);
      ++n;
    }
    std::memcpy(payload.header.data() + at, &n, sizeof n);
  }

  void bytes(nb::handle owner, char which, const char* data, Py_ssize_t n) {
    if (static_cast<size_t>(n) <= kInlineBytesMost || payload.buffers().size() >= kMostBuffers) {
      tag(which);
      count(static_cast<size_t>(n));
      return raw(data, static_cast<size_t>(n));
    }
    tag(which == 'b' ? 'B' : 'Y');
    put(static_cast<uint64_t>(n));
    if (which == 'b') {
      payload.add(data, static_cast<size_t>(n), nb::borrow(owner));
    } else {
      payload.add(owner);  // a bytearray must not be resized meanwhile
    }
  }

  void rare(nb::handle object, uint32_t depth) {
    PyObject* o = object.ptr();
    if (PyByteArray_CheckExact(o)) return bytes(object, 'y', PyByteArray_AS_STRING(o), PyByteArray_GET_SIZE(o));
    if (PyComplex_CheckExact(o)) {
      tag('c');
      put(PyComplex_RealAsDouble(o));
      return put(PyComplex_ImagAsDouble(o));
    }
    if (PyAnySet_CheckExact(o)) {
      tag(PyFrozenSet_CheckExact(o) ? 'z' : 'e');
      const nb::list items(nb::steal<nb::list>(PySequence_List(o)));
      count(items.size());
      for (const nb::handle item : items) value(item, depth + 1);
      return;
    }
    if (is_instance(o, codec.names.numpy_scalar)) {
      const nb::object array = codec.names.as_array(object);
      if (PyDict_Contains(codec.names.numpy_codes.ptr(), nb::object(array.attr("dtype")).ptr()) == 1) {
        return numpy(array, 'g');
      }
    }
    if (codec.torch_is_loaded() && parts(object, depth)) return;
    pickled(object);
  }

  // (Python decides: torch's class of tensors, or an object's own __class__)
  static bool is_instance(PyObject* o, const nb::object& type) { return PyObject_IsInstance(o, type.ptr()) == 1; }

  // What torch makes of a value; false for anything else.
  bool parts(nb::handle object, uint32_t depth) {
    const nb::object found = codec.names.to_parts(object);
    if (found.is_none()) return false;
    const auto pair = nb::cast<nb::tuple>(found);
    tag('x');
    put(nb::cast<uint8_t>(pair[0]));
    value(pair[1], depth + 1);
    return true;
  }

  void array_head(char which, uint8_t code, bool in_line, const std::vector<uint64_t>& shape) {
    tag(which);
    put(code);
    put(static_cast<uint8_t>(shape.size()));
    put(static_cast<uint8_t>(in_line));
    for (const uint64_t axis : shape) put(axis);
  }

  bool stands_inline(size_t bytes) const { return bytes <= kInlineMost || payload.buffers().size() >= kMostBuffers; }

  void numpy(nb::handle object, char which) {
    const NumpyArrays::Fields& array = NumpyArrays::fields(object);
    PyObject* code = PyDict_GetItemWithError(codec.names.numpy_codes.ptr(), array.dtype);
    if (code == nullptr) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return pickled(object);  // objects, strings, dates, structures, another byte order
    }
    if (!array.contiguous()) {
      const nb::object plain = codec.names.as_contiguous(object);
      return numpy(plain, which);
    }
    const std::vector<uint64_t> shape(array.shape, array.shape + array.axes);
    const auto known = static_cast<uint8_t>(PyLong_AsLong(code));
    size_t bytes = codec.itemsizes.at(known);
    for (const uint64_t axis : shape) bytes *= axis;
    const bool in_line = stands_inline(bytes);
    array_head(which, known, in_line, shape);
    if (in_line) {
      if (bytes != 0) raw(array.data, bytes);
    } else {
      payload.add(array.data, bytes, nb::borrow(object));
    }
  }

  void tensor(nb::handle object, uint32_t depth) {
    // A plain tensor: on the CPU, dense, contiguous, without history. Most are, and are returned as they are.
    const nb::object plain = codec.names.to_plain(object);
    if (plain.is_none()) return parts(object, depth) ? void() : pickled(object);
    const nb::object dtype = plain.attr("dtype");
    PyObject* code = PyDict_GetItemWithError(codec.names.torch_codes.ptr(), dtype.ptr());
    if (code == nullptr) return pickled(object);
    const nb::object size = plain.attr("shape");
    std::vector<uint64_t> shape;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(size.ptr()); ++i) {
      shape.push_back(nb::cast<uint64_t>(nb::handle(PyTuple_GET_ITEM(size.ptr(), i))));
    }
    uint64_t bytes = codec.itemsizes.at(static_cast<size_t>(PyLong_AsLong(code)));
    for (const uint64_t axis : shape) bytes *= axis;
    const auto* data = reinterpret_cast<const void*>(nb::cast<uintptr_t>(plain.attr("data_ptr")()));
    const bool in_line = stands_inline(bytes);
    array_head('A', static_cast<uint8_t>(PyLong_AsLong(code)), in_line, shape);
    if (in_line) {
      if (bytes != 0) raw(data, bytes);
    } else {
      payload.add(data, bytes, plain);
    }
  }

  void pickled(nb::handle object) {
    if (!pickle) {
      const nb::object said = nb::module_::import_("geartrain.transport.codec").attr("by_pickle_only")(object);
      fail(ErrorKind::frame, nb::cast<std::string>(said));
    }
    uint32_t buffers = 0;
    const nb::object add = nb::cpp_function([&](nb::handle exported) {
      if (payload.buffers().size() >= kMostBuffers) return true;  // in band
      payload.add(exported.attr("raw")());
      ++buffers;
      return false;
    });
    const auto text = nb::cast<nb::bytes>(codec.dumps(object, add));
    tag('p');
    count(text.size());
    put(buffers);
    raw(text.c_str(), text.size());
  }
};

}  // namespace

void encode(const CodecTypes& codec, nb::handle value, bool pickle, Payload* payload) {
  sleep_at_finalization();
  payload->header.reserve(128);
  Writer{codec, *payload, pickle}.value(value, 0);
}

}  // namespace geartrain
