// Decoder of untrusted headers and buffers. codec.cc has the format.

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>

#include "python/codec.h"

namespace geartrain {
namespace {

constexpr uint32_t kMostAxes = 64;

struct MessageReader {
  const CodecTypes& codec;
  const Message& message;
  const bool pickle;
  size_t at = 0;
  size_t buffer = 0;  // the next
  bool in_pickle = false;

  [[noreturn]] static void refuse(const char* what) { fail(ErrorKind::frame, "the message cannot be decoded: ", what); }
  size_t left() const { return message.header.size() - at; }

  const std::byte* raw(size_t bytes) {
    if (bytes > left()) refuse("it ends too early");
    const std::byte* from = message.header.data() + at;
    at += bytes;
    return from;
  }
  template <typename T>
  T get() {
    T number;
    std::memcpy(&number, raw(sizeof number), sizeof number);
    return number;
  }
  // The number of values that follow: each takes a byte at least, so their memory is never out of proportion.
  uint32_t count() {
    const auto n = get<uint32_t>();
    if (n > left()) refuse("it ends too early");
    return n;
  }
  std::span<std::byte> next_buffer() {
    if (buffer == message.buffers.size()) refuse("it has fewer buffers than it refers to");
    return message.buffers[buffer++];
  }

  void finish() const {
    if (left() != 0) refuse("something follows its value");
    if (buffer != message.buffers.size()) refuse("it has more buffers than it refers to");
  }

  static nb::object checked(PyObject* made) {
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
  }

  nb::object value(uint32_t depth) {
    if (depth > codec.max_depth) refuse("it is nested too deep");
    switch (const char tag = static_cast<char>(get<uint8_t>())) {
      case 'N':
        return nb::none();
      case 'T':
        return nb::borrow(Py_True);
      case 'F':
        return nb::borrow(Py_False);
      case 'i':
        return checked(PyLong_FromLongLong(get<int64_t>()));
      case 'I': {
        const uint32_t n = count();
        if (n > kMostIntBytes) refuse("an int is too long");
        const nb::bytes digits(reinterpret_cast<const char*>(raw(n)), n);
        return nb::handle(reinterpret_cast<PyObject*>(&PyLong_Type))
            .attr("from_bytes")(digits, "little", nb::arg("signed") = true);
      }
      case 'd':
        return checked(PyFloat_FromDouble(get<double>()));
      case 'c': {
        const auto real = get<double>(), imaginary = get<double>();
        return checked(PyComplex_FromDoubles(real, imaginary));
      }
      case 's': {
        const uint32_t n = count();
        return checked(PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(raw(n)), n, "strict"));
      }
      case 'b':
      case 'y': {
        const uint32_t n = count();
        const auto* data = reinterpret_cast<const char*>(raw(n));
        return checked(tag == 'b' ? PyBytes_FromStringAndSize(data, n) : PyByteArray_FromStringAndSize(data, n));
      }
      case 'B':
      case 'Y': {
        const std::span<std::byte> from = next_buffer();
        if (get<uint64_t>() != from.size()) refuse("a buffer is not as long as it should be");
        const auto* data = reinterpret_cast<const char*>(from.data());
        const auto n = static_cast<Py_ssize_t>(from.size());
        return checked(tag == 'B' ? PyBytes_FromStringAndSize(data, n) : PyByteArray_FromStringAndSize(data, n));
      }
      case 't':
      case 'l': {
        const uint32_t n = count();
        nb::object made = checked(tag == 't' ? PyTuple_New(n) : PyList_New(n));
        for (uint32_t i = 0; i < n; ++i) {
          PyObject* item = value(depth + 1).release().ptr();
          if (tag == 't') {
            PyTuple_SET_ITEM(made.ptr(), i, item);
          } else {
            PyList_SET_ITEM(made.ptr(), i, item);
          }
        }
        return made;
      }
      case 'e':
      case 'z': {
        const uint32_t n = count();
        nb::object made = checked(tag == 'e' ? PySet_New(nullptr) : PyFrozenSet_New(nullptr));
        for (uint32_t i = 0; i < n; ++i) {
          if (PySet_Add(made.ptr(), value(depth + 1).ptr()) != 0) throw nb::python_error();
        }
        return made;
      }
      case 'm': {
        const uint32_t n = count();
        nb::object made = checked(PyDict_New());
        for (uint32_t i = 0; i < n; ++i) {
          const nb::object key = value(depth + 1);
          const nb::object item = value(depth + 1);
          if (PyDict_SetItem(made.ptr(), key.ptr(), item.ptr()) != 0) throw nb::python_error();
        }
        return made;
      }
      case 'a':
      case 'A':
      case 'g':
        return array(tag);
      case 'p':
        return pickled();
      case 'x': {
        const auto kind = get<uint8_t>();
        const nb::object parts = value(depth + 1);
        codec.need_torch();
        return codec.names.from_parts(kind, parts);
      }
      default:
        refuse("it holds a value of unknown type");
    }
  }

  nb::object array(char which) {
    const auto code = get<uint8_t>(), axes = get<uint8_t>(), in_line = get<uint8_t>();
    const size_t itemsize = code < codec.itemsizes.size() ? codec.itemsizes.at(code) : 0;
    if (itemsize == 0) refuse("an array has an unknown dtype");
    if (axes > kMostAxes || in_line > 1 || (which == 'g' && axes != 0)) refuse("an array has too many axes");
    std::vector<size_t> shape;
    size_t bytes = itemsize;
    bool empty = false;
    for (uint8_t i = 0; i < axes; ++i) {
      const auto axis = get<uint64_t>();
      if (axis > (uint64_t{1} << 62)) refuse("an array is larger than memory can be");
      shape.push_back(axis);
      empty |= axis == 0;
      // The axes next to an empty one count as well: NumPy and torch multiply them.
      if (axis != 0 && (__builtin_mul_overflow(bytes, axis, &bytes) || bytes > (size_t{1} << 62))) {
        refuse("an array is larger than memory can be");
      }
    }
    if (empty) bytes = 0;
    std::span<std::byte> elements;
    std::shared_ptr<void> owner;
    if (in_line != 0) {
      // Its own memory: a number must not keep a message of a gigabyte alive.
      const std::byte* from = raw(bytes);
      auto copy = std::shared_ptr<std::byte[]>(new std::byte[std::max<size_t>(bytes, 16)]);
      if (bytes != 0) std::memcpy(copy.get(), from, bytes);
      elements = {copy.get(), bytes};
      owner = std::move(copy);
    } else {
      elements = next_buffer();
      if (elements.size() != bytes) refuse("a buffer is not as long as it should be");
      owner = message.owner;
    }
    const nb::capsule keep(new std::shared_ptr<void>(std::move(owner)),
                           [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
    nb::dlpack::dtype dtype = array_dtype(code, static_cast<uint8_t>(itemsize));
    if (which != 'A') {
      if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && !is_unsigned(code)) {
        refuse("an array has a dtype that NumPy does not know");
      }
      nb::object made =
          nb::cast(nb::ndarray<nb::numpy>(elements.data(), shape.size(), shape.data(), keep, nullptr, dtype));
      return which == 'g' ? nb::object(made[nb::tuple()]) : made;
    }
    // By way of NumPy: several times as fast as torch's own DLPack import.
    codec.need_torch();
    if (code == kUint64) dtype.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Int);  // it knows one name of two
    nb::object made = codec.names.from_numpy(
        nb::cast(nb::ndarray<nb::numpy>(elements.data(), shape.size(), shape.data(), keep, nullptr, dtype)));
    const bool as_raw =
        code == kUint64 || (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && !is_unsigned(code));
    return as_raw ? made.attr("view")(nb::object(codec.names.torch_dtypes[nb::int_(code)])) : made;
  }

  static constexpr uint8_t kUint64 = 8;
  static bool is_unsigned(uint8_t code) { return code == 2 || code == 4 || code == 6 || code == 8; }

  nb::object pickled() {
    if (!pickle) {
      fail(ErrorKind::untrusted,
           "the message holds a pickle, and pickles are only accepted from peers that proved they "
           "know the cluster's secret, where pickle is allowed");
    }
    const uint32_t n = count();
    const auto buffers = get<uint32_t>();
    const nb::bytes text(reinterpret_cast<const char*>(raw(n)), n);
    if (buffers > message.buffers.size() - buffer) refuse("it has fewer buffers than it refers to");
    nb::list given;
    for (uint32_t i = 0; i < buffers; ++i) {
      const std::span<std::byte> one = next_buffer();
      const nb::capsule keep(new std::shared_ptr<void>(message.owner),
                             [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
      const size_t shape[1] = {one.size()};
      given.append(nb::cast(nb::ndarray<nb::numpy, uint8_t>(one.data(), 1, shape, keep)));
    }
    in_pickle = true;
    nb::object value = codec.loads(text, given);
    in_pickle = false;
    return value;
  }
};

}  // namespace

nb::object decode(const CodecTypes& codec, const Message& message, bool pickle) {
  MessageReader reader{codec, message, pickle};
  try {
    nb::object value = reader.value(0);
    reader.finish();
    return value;
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt) || reader.in_pickle) throw;
    fail(ErrorKind::frame, "the message cannot be decoded: ", error.what());
  }
}

}  // namespace geartrain
