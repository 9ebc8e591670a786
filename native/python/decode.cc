// Decoder of untrusted headers and buffers. codec.cc has the format.

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "base/sha256.h"
#include "python/codec.h"
#include "transport/value_reader.h"

namespace geartrain {
namespace {

// Keys of one hash that a dict or set may have: each costs a comparison with all before it. Strings and bytes cannot be
// made to collide; numbers and tuples can.
constexpr uint32_t kMostOfOneHash = 64;

// Refuses keys that were chosen to collide: 100,000 of them would take minutes, with the GIL held.
class KeyHashes {
 public:
  KeyHashes(uint32_t keys, bool trusted) : counted_(!trusted && keys > kMostOfOneHash) {}
  void add(PyObject* key) {
    const bool of_text = PyUnicode_CheckExact(key) || PyBytes_CheckExact(key);
    if (!counted_ || of_text) return;
    const Py_hash_t hash = PyObject_Hash(key);
    if (hash == -1) throw nb::python_error();
    if (++counts_[hash] > kMostOfOneHash) ValueReader::refuse("too many keys of a dict or set have the same hash");
  }

 private:
  // The standard library's own hash is the number itself, and collides as easily. This one is keyed.
  struct Scatter {
    size_t operator()(Py_hash_t hash) const {
      static const uint64_t key = random_number();
      uint64_t mixed = static_cast<uint64_t>(hash) ^ key;
      mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
      mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
      return mixed ^ (mixed >> 31);
    }
  };
  const bool counted_;
  std::unordered_map<Py_hash_t, uint32_t, Scatter> counts_;
};

struct MessageReader {
  const CodecTypes& codec;
  const Message& message;
  const bool pickle;
  ValueReader in{message.header, message.buffers, codec.itemsizes, codec.max_depth};
  bool in_pickle = false;

  static nb::object checked(PyObject* made) {
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
  }
  static const char* chars(Bytes bytes) { return reinterpret_cast<const char*>(bytes.data()); }
  static Py_ssize_t size(Bytes bytes) { return static_cast<Py_ssize_t>(bytes.size()); }

  nb::object value(uint32_t depth) {
    switch (const char tag = in.tag(depth)) {
      case 'N':
        return nb::none();
      case 'T':
        return nb::borrow(Py_True);
      case 'F':
        return nb::borrow(Py_False);
      case 'i':
        return checked(PyLong_FromLongLong(in.number<int64_t>()));
      case 'I': {
        const Bytes found = in.digits();
        const nb::bytes digits(chars(found), found.size());
        const nb::handle type(reinterpret_cast<PyObject*>(&PyLong_Type));
        return type.attr("from_bytes")(digits, "little", nb::arg("signed") = true);
      }
      case 'd':
        return checked(PyFloat_FromDouble(in.number<double>()));
      case 'c': {
        const auto real = in.number<double>(), imaginary = in.number<double>();
        return checked(PyComplex_FromDoubles(real, imaginary));
      }
      case 's': {
        const Bytes text = in.text();
        return checked(PyUnicode_DecodeUTF8(chars(text), size(text), "strict"));
      }
      case 'b':
      case 'y': {
        const Bytes text = in.text();
        return checked(tag == 'b' ? PyBytes_FromStringAndSize(chars(text), size(text))
                                  : PyByteArray_FromStringAndSize(chars(text), size(text)));
      }
      case 'B':
      case 'Y': {
        const Bytes from = in.buffer_of_bytes();
        return checked(tag == 'B' ? PyBytes_FromStringAndSize(chars(from), size(from))
                                  : PyByteArray_FromStringAndSize(chars(from), size(from)));
      }
      case 't':
      case 'l': {
        const uint32_t n = in.items(1);
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
        const uint32_t n = in.items(1);
        nb::object made = checked(tag == 'e' ? PySet_New(nullptr) : PyFrozenSet_New(nullptr));
        KeyHashes hashes(n, pickle);
        for (uint32_t i = 0; i < n; ++i) {
          const nb::object key = value(depth + 1);
          hashes.add(key.ptr());
          if (PySet_Add(made.ptr(), key.ptr()) != 0) throw nb::python_error();
        }
        return made;
      }
      case 'm': {
        const uint32_t n = in.items(2);
        nb::object made = checked(PyDict_New());
        KeyHashes hashes(n, pickle);
        for (uint32_t i = 0; i < n; ++i) {
          const nb::object key = value(depth + 1);
          hashes.add(key.ptr());
          const nb::object item = value(depth + 1);
          if (PyDict_SetItem(made.ptr(), key.ptr(), item.ptr()) != 0) {
            throw nb::python_error();
          }
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
        const uint8_t kind = in.kind();
        const nb::object parts = value(depth + 1);
        codec.need_torch();
        return codec.names.from_parts(kind, parts);
      }
      default:
        ValueReader::refuse("it holds a value of unknown type");
    }
  }

  nb::object array(char which) {
    const ValueReader::Array found = in.array(which == 'g');
    const uint8_t code = found.code;
    const std::vector<size_t>& shape = found.shape;
    auto* elements = const_cast<std::byte*>(found.elements.data());
    std::shared_ptr<void> owner;
    if (found.in_line) {
      // Its own memory: a number must not keep a message of a gigabyte alive.
      const size_t bytes = found.elements.size();
      auto copy = std::shared_ptr<std::byte[]>(new std::byte[std::max<size_t>(bytes, 16)]);
      if (bytes != 0) std::memcpy(copy.get(), elements, bytes);
      elements = copy.get();
      owner = std::move(copy);
    } else {
      owner = message.owner;
    }
    const nb::capsule keep(new std::shared_ptr<void>(std::move(owner)),
                           [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
    nb::dlpack::dtype dtype = array_dtype(code, found.itemsize);
    if (which != 'A') {
      if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && !is_unsigned(code)) {
        ValueReader::refuse("an array has a dtype that NumPy does not know");
      }
      nb::object made = nb::cast(nb::ndarray<nb::numpy>(elements, shape.size(), shape.data(), keep, nullptr, dtype));
      return which == 'g' ? nb::object(made[nb::tuple()]) : made;
    }
    // By way of NumPy: several times as fast as torch's own DLPack import.
    codec.need_torch();
    if (code == kUint64) dtype.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Int);  // it knows one name of two
    const nb::object plain =
        nb::cast(nb::ndarray<nb::numpy>(elements, shape.size(), shape.data(), keep, nullptr, dtype));
    nb::object made = codec.names.from_numpy(plain);
    const bool as_raw =
        code == kUint64 || (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && !is_unsigned(code));
    if (!as_raw) return made;
    const nb::object type = codec.names.torch_dtypes[nb::int_(code)];
    return made.attr("view")(type);
  }

  static constexpr uint8_t kUint64 = 8;
  static bool is_unsigned(uint8_t code) { return code == 2 || code == 4 || code == 6 || code == 8; }

  nb::object pickled() {
    if (!pickle) {
      fail(ErrorKind::untrusted,
           "the message holds a pickle, and pickles are only accepted from peers that proved they "
           "know the cluster's secret, where pickle is allowed");
    }
    const ValueReader::Pickle found = in.pickle();
    const nb::bytes text(chars(found.text), found.text.size());
    nb::list given;
    for (const std::span<std::byte> one : found.buffers) {
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
  sleep_at_finalization();
  MessageReader reader{codec, message, pickle};
  try {
    nb::object value = reader.value(0);
    reader.in.finish();
    return value;
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt) || reader.in_pickle) throw;
    fail(ErrorKind::frame, "the message cannot be decoded: ", error.what());
  }
}

}  // namespace geartrain
