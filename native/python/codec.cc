// geartrain._native.Codec: values as a header and buffers, and back, without executing anything that came.
//
// A value is one byte that says what follows, and then that; numbers are little-endian:
//
//   N T F        None, True, False
//   i  i64       an int that fits                   I  u32 n, n bytes   one that does not, two's complement
//   d  f64       float                              c  2 x f64          complex
//   s  u32 n, n bytes of UTF-8    str               b  u32 n, n bytes   bytes            y  the same   bytearray
//   B  u64 n     bytes, in the next buffer          Y  the same         bytearray
//   l t e z  u32 n, n values      list, tuple, set, frozenset
//   m  u32 n, n keys and values   dict
//   a A g  u8 dtype, u8 axes, u8 inline, axes x u64; then the elements, if inline, else they are the next buffer
//                                 NumPy array, torch tensor, NumPy scalar (no axes)
//   p  u32 n, u32 k, n bytes      a pickle of protocol 5 with k buffers out of band; only where that is allowed
//
// Small arrays stand inline, large ones are the message's buffers, used once each and in order: what was sent is not
// copied here, and an array that was received is a view of the message's memory. Dtypes are schema.py's codes.
//
// The decoder is safe against any bytes: it reads within bounds, takes memory in proportion to what came, and goes
// down to the depth that was set. Whatever is wrong is one error, of kind frame.

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "python/bind.h"
#include "python/messages.h"

namespace geartrain {
namespace {

constexpr size_t kInlineMost = 512;        // an array of so many bytes stands in the header
constexpr size_t kInlineBytesMost = 4096;  // and so do bytes
constexpr size_t kMostInlinePerHeader = 32 << 20;
constexpr uint32_t kMostIntBytes = 1 << 16;
constexpr uint32_t kMostAxes = 64;
constexpr size_t kMostBuffers = 4096;

// The names of Python that both halves need, looked up once.
struct Names {
  nb::object numpy_array, numpy_scalar, as_array, numpy_codes;  // dict: numpy dtype -> code
  nb::object torch_tensor, torch_codes, torch_dtypes;           // set once torch is there; dicts both ways
  nb::object to_plain, from_numpy;
};

class Codec {
 public:
  // `numpy_codes`: dict of numpy dtypes to codes; `itemsizes`: dict of codes to sizes; `torch_part`: called once torch
  // is needed, returns (Tensor, dict of dtypes to codes, dict of codes to dtypes, function to a plain CPU tensor,
  // from_numpy). `dumps(value, add_buffer)` and `loads(bytes, buffers)` are for what only pickle can do.
  Codec(nb::dict numpy_codes, const nb::dict& itemsizes, nb::object torch_part, nb::object dumps, nb::object loads,
        uint32_t max_depth)
      : torch_part_(std::move(torch_part)), dumps_(std::move(dumps)), loads_(std::move(loads)), max_depth_(max_depth) {
    const nb::module_ numpy = nb::module_::import_("numpy");
    names_.numpy_array = numpy.attr("ndarray");
    names_.numpy_scalar = numpy.attr("generic");
    names_.as_array = numpy.attr("asarray");
    names_.numpy_codes = std::move(numpy_codes);
    for (const auto& [code, size] : itemsizes) itemsizes_.at(nb::cast<uint8_t>(code)) = nb::cast<uint8_t>(size);
  }

  Parcel* encode(nb::handle value, bool pickle) const {
    auto parcel = std::make_unique<Parcel>();
    parcel->header.reserve(128);
    Writer{*this, *parcel, pickle}.value(value, 0);
    return parcel.release();
  }

  nb::object decode(const Arrived& arrived, bool pickle) const {
    Reader reader{*this, arrived.message, pickle};
    try {
      nb::object value = reader.value(0);
      reader.finish();
      return value;
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_KeyboardInterrupt) || reader.in_pickle) throw;
      fail(ErrorKind::frame, "the message cannot be decoded: ", error.what());
    }
  }

 private:
  void need_torch() const {
    if (names_.torch_tensor.is_valid()) return;
    const nb::tuple part = nb::cast<nb::tuple>(torch_part_());
    names_.torch_codes = part[1];
    names_.torch_dtypes = part[2];
    names_.to_plain = part[3];
    names_.from_numpy = part[4];
    names_.torch_tensor = part[0];
  }
  bool torch_is_loaded() const {
    if (names_.torch_tensor.is_valid()) return true;
    PyObject* modules = PyImport_GetModuleDict();
    if (PyDict_GetItemString(modules, "torch") == nullptr) return false;
    need_torch();
    return true;
  }

  // --- encoding -----------------------------------------------------------------------------------------------------

  struct Writer {
    const Codec& codec;
    Parcel& parcel;
    const bool pickle;

    template <typename T>
    void put(T number) {
      const auto* bytes = reinterpret_cast<const std::byte*>(&number);
      parcel.header.insert(parcel.header.end(), bytes, bytes + sizeof number);
    }
    void tag(char which) { parcel.header.push_back(static_cast<std::byte>(which)); }
    void raw(const void* data, size_t bytes) {
      const auto* begin = static_cast<const std::byte*>(data);
      parcel.header.insert(parcel.header.end(), begin, begin + bytes);
    }
    void count(size_t n) {
      if (n > 0xffffffffu) fail(ErrorKind::frame, "a container or string has 2^32 - 1 elements at most, found ", n);
      put(static_cast<uint32_t>(n));
    }

    void value(nb::handle object, uint32_t depth) {
      PyObject* o = object.ptr();
      if (depth > codec.max_depth_) {
        fail(ErrorKind::frame, "containers are nested deeper than ", codec.max_depth_, ", or contain themselves");
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
        const size_t at = parcel.header.size();
        count(0);
        uint32_t n = 0;
        for (; n < PyList_GET_SIZE(o); ++n) value(nb::borrow(PyList_GET_ITEM(o, n)), depth + 1);
        std::memcpy(parcel.header.data() + at, &n, sizeof n);
        return;
      }
      if (PyDict_CheckExact(o)) return dict(o, depth);
      if (PyBytes_CheckExact(o)) return bytes(object, 'b', PyBytes_AS_STRING(o), PyBytes_GET_SIZE(o));
      if (Py_TYPE(o) == reinterpret_cast<PyTypeObject*>(codec.names_.numpy_array.ptr())) return numpy(object, 'a');
      if (codec.torch_is_loaded() && PyObject_IsInstance(o, codec.names_.torch_tensor.ptr()) == 1)
        return tensor(object);
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
      const size_t at = parcel.header.size();
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
      std::memcpy(parcel.header.data() + at, &n, sizeof n);
    }

    void bytes(nb::handle owner, char which, const char* data, Py_ssize_t n) {
      if (static_cast<size_t>(n) <= kInlineBytesMost || parcel.buffers().size() >= kMostBuffers) {
        tag(which);
        count(static_cast<size_t>(n));
        return raw(data, static_cast<size_t>(n));
      }
      tag(which == 'b' ? 'B' : 'Y');
      put(static_cast<uint64_t>(n));
      if (which == 'b') {
        parcel.add(data, static_cast<size_t>(n), nb::borrow(owner));
      } else {
        parcel.add(owner);  // a bytearray must not be resized meanwhile
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
      if (PyObject_IsInstance(o, codec.names_.numpy_scalar.ptr()) == 1) {
        const nb::object array = codec.names_.as_array(object);
        if (PyDict_Contains(codec.names_.numpy_codes.ptr(), nb::object(array.attr("dtype")).ptr()) == 1) {
          return numpy(array, 'g');
        }
      }
      pickled(object);
    }

    void array_head(char which, uint8_t code, bool in_line, const std::vector<uint64_t>& shape) {
      tag(which);
      put(code);
      put(static_cast<uint8_t>(shape.size()));
      put(static_cast<uint8_t>(in_line));
      for (const uint64_t axis : shape) put(axis);
    }

    bool stands_inline(size_t bytes) const { return bytes <= kInlineMost || parcel.buffers().size() >= kMostBuffers; }

    void numpy(nb::handle object, char which) {
      const nb::object dtype = object.attr("dtype");
      PyObject* code = PyDict_GetItemWithError(codec.names_.numpy_codes.ptr(), dtype.ptr());
      if (code == nullptr) {
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        return pickled(object);  // objects, strings, dates, structures, another byte order
      }
      Py_buffer view;
      if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();
        const nb::object plain = nb::module_::import_("numpy").attr("ascontiguousarray")(object);
        return numpy(plain, which);
      }
      std::vector<uint64_t> shape(view.shape, view.shape + view.ndim);
      const bool in_line = stands_inline(static_cast<size_t>(view.len));
      array_head(which, static_cast<uint8_t>(PyLong_AsLong(code)), in_line, shape);
      if (in_line) {
        raw(view.buf, static_cast<size_t>(view.len));
      } else {
        parcel.add(view.buf, static_cast<size_t>(view.len), nb::borrow(object));
      }
      PyBuffer_Release(&view);
    }

    void tensor(nb::handle object) {
      // A plain tensor: on the CPU, dense, contiguous, without history. Most are, and are returned as they are.
      const nb::object plain = codec.names_.to_plain(object);
      if (plain.is_none()) return pickled(object);
      PyObject* code = PyDict_GetItemWithError(codec.names_.torch_codes.ptr(), nb::object(plain.attr("dtype")).ptr());
      if (code == nullptr) return pickled(object);
      const nb::object size = plain.attr("shape");
      std::vector<uint64_t> shape;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(size.ptr()); ++i) {
        shape.push_back(nb::cast<uint64_t>(nb::handle(PyTuple_GET_ITEM(size.ptr(), i))));
      }
      uint64_t bytes = codec.itemsizes_.at(static_cast<size_t>(PyLong_AsLong(code)));
      for (const uint64_t axis : shape) bytes *= axis;
      const auto* data = reinterpret_cast<const void*>(nb::cast<uintptr_t>(plain.attr("data_ptr")()));
      const bool in_line = stands_inline(bytes);
      array_head('A', static_cast<uint8_t>(PyLong_AsLong(code)), in_line, shape);
      if (in_line) {
        if (bytes != 0) raw(data, bytes);
      } else {
        parcel.add(data, bytes, plain);
      }
    }

    void pickled(nb::handle object) {
      if (!pickle) {
        fail(ErrorKind::frame, "a ", nb::cast<std::string>(nb::object(nb::str(object.type()))),
             " is sent by pickle only, and that is for peers that proved they know the cluster's secret, where "
             "pickle is allowed");
      }
      uint32_t buffers = 0;
      const nb::object add = nb::cpp_function([&](nb::handle exported) {
        if (parcel.buffers().size() >= kMostBuffers) return true;  // in band
        parcel.add(nb::object(exported.attr("raw")()));
        ++buffers;
        return false;
      });
      const auto text = nb::cast<nb::bytes>(codec.dumps_(object, add));
      tag('p');
      count(text.size());
      put(buffers);
      raw(text.c_str(), text.size());
    }
  };

  // --- decoding -----------------------------------------------------------------------------------------------------

  struct Reader {
    const Codec& codec;
    const Message& message;
    const bool pickle;
    size_t at = 0;
    size_t buffer = 0;  // the next
    bool in_pickle = false;

    [[noreturn]] static void refuse(const char* what) {
      fail(ErrorKind::frame, "the message cannot be decoded: ", what);
    }
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
    // How many values follow: each takes a byte at least, so memory for them is never out of proportion.
    uint32_t count() {
      const auto n = get<uint32_t>();
      if (n > left()) refuse("it ends too early");
      return n;
    }
    std::span<std::byte> next_buffer() {
      if (buffer == message.buffers.size()) refuse("it has fewer buffers than it speaks of");
      return message.buffers[buffer++];
    }

    void finish() const {
      if (left() != 0) refuse("something follows its value");
      if (buffer != message.buffers.size()) refuse("it has more buffers than it speaks of");
    }

    static nb::object checked(PyObject* made) {
      if (made == nullptr) throw nb::python_error();
      return nb::steal(made);
    }

    nb::object value(uint32_t depth) {
      if (depth > codec.max_depth_) refuse("it is nested too deep");
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
        default:
          refuse("it holds a kind of value that this version does not know");
      }
    }

    nb::object array(char which) {
      const auto code = get<uint8_t>(), axes = get<uint8_t>(), in_line = get<uint8_t>();
      const size_t itemsize = code < codec.itemsizes_.size() ? codec.itemsizes_.at(code) : 0;
      if (itemsize == 0) refuse("an array has a dtype that this version does not know");
      if (axes > kMostAxes || in_line > 1 || (which == 'g' && axes != 0)) refuse("an array has too many axes");
      std::vector<size_t> shape;
      size_t bytes = itemsize;
      bool empty = false;
      for (uint8_t i = 0; i < axes; ++i) {
        const auto axis = get<uint64_t>();
        if (axis > (uint64_t{1} << 62)) refuse("an array is larger than memory can be");
        shape.push_back(axis);
        empty |= axis == 0;
        // The axes beside an empty one count as well: NumPy and torch multiply them.
        if (axis != 0 && (__builtin_mul_overflow(bytes, axis, &bytes) || bytes > (size_t{1} << 62))) {
          refuse("an array is larger than memory can be");
        }
      }
      if (empty) bytes = 0;
      std::span<std::byte> elements;
      std::shared_ptr<void> owner;
      if (in_line != 0) {
        // Its own memory: a number must not keep a message of a gigabyte.
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
      // By way of NumPy: several times as fast as torch's own way in through DLPack.
      codec.need_torch();
      if (code == kUint64) dtype.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Int);  // it knows one name of two
      nb::object made = codec.names_.from_numpy(
          nb::cast(nb::ndarray<nb::numpy>(elements.data(), shape.size(), shape.data(), keep, nullptr, dtype)));
      const bool as_raw =
          code == kUint64 || (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && !is_unsigned(code));
      return as_raw ? made.attr("view")(nb::object(codec.names_.torch_dtypes[nb::int_(code)])) : made;
    }

    static constexpr uint8_t kUint64 = 8;
    static bool is_unsigned(uint8_t code) { return code == 2 || code == 4 || code == 6 || code == 8; }

    nb::object pickled() {
      if (!pickle) {
        fail(ErrorKind::untrusted,
             "the message holds a pickle, and pickles are only taken from peers that proved they "
             "know the cluster's secret, where pickle is allowed");
      }
      const uint32_t n = count();
      const auto buffers = get<uint32_t>();
      const nb::bytes text(reinterpret_cast<const char*>(raw(n)), n);
      if (buffers > message.buffers.size() - buffer) refuse("it has fewer buffers than it speaks of");
      nb::list given;
      for (uint32_t i = 0; i < buffers; ++i) {
        const std::span<std::byte> one = next_buffer();
        const nb::capsule keep(new std::shared_ptr<void>(message.owner),
                               [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
        const size_t shape[1] = {one.size()};
        given.append(nb::cast(nb::ndarray<nb::numpy, uint8_t>(one.data(), 1, shape, keep)));
      }
      in_pickle = true;
      nb::object value = codec.loads_(text, given);
      in_pickle = false;
      return value;
    }
  };

  mutable Names names_;
  std::array<uint8_t, 256> itemsizes_{};
  nb::object torch_part_, dumps_, loads_;
  const uint32_t max_depth_;
};

Arrived* arrived_from(const nb::bytes& header, const nb::list& buffers) {
  auto made = std::make_unique<Arrived>();
  Parcel parts;
  std::vector<uint64_t> sizes;
  for (const nb::handle buffer : buffers) parts.add(buffer);
  for (const Bytes& part : parts.buffers()) sizes.push_back(part.size());
  make_room(&made->message, header.size(), sizes);
  std::memcpy(made->message.header.data(), header.c_str(), header.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 0) std::memcpy(made->message.buffers[i].data(), parts.buffers()[i].data(), sizes[i]);
  }
  return made.release();
}

nb::list views_of(const Message& message) {
  nb::list out;
  for (const auto& buffer : message.buffers) {
    const nb::capsule keep(new std::shared_ptr<void>(message.owner),
                           [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
    const size_t shape[1] = {buffer.size()};
    out.append(nb::cast(nb::ndarray<nb::numpy, uint8_t>(reinterpret_cast<uint8_t*>(buffer.data()), 1, shape, keep)));
  }
  return out;
}

}  // namespace

void bind_codec(nb::module_& module) {
  nb::class_<Arrived>(module, "Message")
      .def_static("make", &arrived_from)
      .def_prop_ro("tag", [](const Arrived& self) { return self.message.tag; })
      .def_prop_ro("kind", [](const Arrived& self) { return self.message.kind; })
      .def_prop_ro("nbytes", [](const Arrived& self) { return self.message.bytes(); })
      .def_prop_ro("header",
                   [](const Arrived& self) {
                     return nb::bytes(reinterpret_cast<const char*>(self.message.header.data()),
                                      self.message.header.size());
                   })
      .def_prop_ro("buffers", [](const Arrived& self) { return views_of(self.message); });

  nb::class_<Parcel>(module, "Parcel")
      .def("__init__",
           [](Parcel* self, const nb::bytes& header, const nb::list& buffers) {
             auto* made = new (self) Parcel();
             const auto* begin = reinterpret_cast<const std::byte*>(header.c_str());
             made->header.assign(begin, begin + header.size());
             try {
               for (const nb::handle buffer : buffers) made->add(buffer);
             } catch (...) {
               made->~Parcel();
               throw;
             }
           })
      .def_prop_ro("header",
                   [](const Parcel& self) {
                     return nb::bytes(reinterpret_cast<const char*>(self.header.data()), self.header.size());
                   })
      .def_prop_ro("buffers",
                   [](nb::handle_t<Parcel> self) {
                     nb::list out;
                     for (const Bytes& part : nb::cast<const Parcel&>(self).buffers()) {
                       const size_t shape[1] = {part.size()};
                       out.append(nb::cast(nb::ndarray<nb::numpy, const uint8_t>(
                           reinterpret_cast<const uint8_t*>(part.data()), 1, shape, nb::borrow(self))));
                     }
                     return out;
                   })
      .def_prop_ro("nbytes", [](const Parcel& self) {
        size_t bytes = self.header.size();
        for (const Bytes& part : self.buffers()) bytes += part.size();
        return bytes;
      });

  nb::class_<Codec>(module, "Codec")
      .def(nb::init<nb::dict, const nb::dict&, nb::object, nb::object, nb::object, uint32_t>())
      .def("encode", &Codec::encode, nb::arg("value").none(), nb::arg("pickle") = false)
      .def("decode", &Codec::decode, nb::arg("message"), nb::arg("pickle") = false);
}

}  // namespace geartrain
