// Decoder of untrusted headers and buffers. codec.cc has the format.

#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <unordered_map>

#include "base/clock.h"
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

// Gives the GIL to other threads every few milliseconds: 60 MB of empty lists are twelve million objects, and seconds.
//
// Whoever takes the GIL meanwhile finds nothing half made: containers with places that are still empty are tracked by
// the garbage collector once they are full (`Untracked`). Memory that came is the message's, which the caller holds.
// A thread that the interpreter's end finds here sleeps, as in any native call. Signals wait for the call's end. One
// long text, and a collection of garbage that the new objects bring about, hold the GIL for as long as they take.
class Turns {
 public:
  void after_a_value() {
    if (--values_left_ == 0) look();
  }

 private:
  static constexpr uint32_t kValues = 256;  // a clock for each would take longer than some of them
  static constexpr uint64_t kTurnNs = 5'000'000;

  void look() {
    values_left_ = kValues;
    const uint64_t now_ns = monotonic_ns();
    if (since_ns_ != 0 && now_ns - since_ns_ > kTurnNs) {
      const Unlocked unlocked;
      // Whoever waits is woken by the release, and would find the GIL taken again by this thread.
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      since_ns_ = 0;
    }
    if (since_ns_ == 0) since_ns_ = monotonic_ns();
  }
  uint32_t values_left_ = kValues;
  uint64_t since_ns_ = 0;  // the GIL was taken; 0: not looked yet
};

// A new list or tuple, unknown to the garbage collector until it has its items. `gc.get_objects` in another thread
// would find it, and whatever reads a place that is empty, or resizes it, ends the process.
class Untracked {
 public:
  Untracked(nb::object made, uint32_t items) : made_(std::move(made)), hidden_(items != 0) {
    if (hidden_) PyObject_GC_UnTrack(made_.ptr());
  }
  PyObject* ptr() const { return made_.ptr(); }
  nb::object full() {
    if (hidden_) PyObject_GC_Track(made_.ptr());
    return std::move(made_);
  }

 private:
  nb::object made_;
  const bool hidden_;  // an empty tuple is one for all
};

// The GIL is not held during a copy that takes longer than its release.
void copy_apart(void* to, const void* from, size_t bytes) {
  constexpr size_t kApart = size_t{1} << 18;
  if (bytes == 0) return;
  if (bytes < kApart) {
    std::memcpy(to, from, bytes);
    return;
  }
  const Unlocked unlocked;
  std::memcpy(to, from, bytes);
}

struct MessageReader {
  const CodecTypes& codec;
  const Message& message;
  const bool pickle;
  ValueReader in{message.header, message.buffers, codec.itemsizes, codec.max_depth};
  bool in_pickle = false;
  Turns turns;

  static nb::object checked(PyObject* made) {
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
  }
  static const char* chars(Bytes bytes) { return reinterpret_cast<const char*>(bytes.data()); }
  static Py_ssize_t size(Bytes bytes) { return static_cast<Py_ssize_t>(bytes.size()); }

  nb::object bytes_of(Bytes found, bool mutable_) {
    const nb::object made = checked(mutable_ ? PyByteArray_FromStringAndSize(nullptr, size(found))
                                             : PyBytes_FromStringAndSize(nullptr, size(found)));
    // (nobody else has it: neither is tracked by the garbage collector)
    copy_apart(mutable_ ? PyByteArray_AS_STRING(made.ptr()) : PyBytes_AS_STRING(made.ptr()), found.data(),
               found.size());
    return made;
  }

  nb::object value(uint32_t depth) {
    turns.after_a_value();
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
      case 'y':
        return bytes_of(in.text(), tag == 'y');
      case 'B':
      case 'Y':
        return bytes_of(in.buffer_of_bytes(), tag == 'Y');
      case 't':
      case 'l': {
        const uint32_t n = in.items(1);
        Untracked made(checked(tag == 't' ? PyTuple_New(n) : PyList_New(n)), n);
        for (uint32_t i = 0; i < n; ++i) {
          PyObject* item = value(depth + 1).release().ptr();
          if (tag == 't') {
            PyTuple_SET_ITEM(made.ptr(), i, item);
          } else {
            PyList_SET_ITEM(made.ptr(), i, item);
          }
        }
        return made.full();
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
      copy_apart(copy.get(), elements, bytes);
      elements = copy.get();
      owner = std::move(copy);
    } else {
      owner = message.owner;
    }
    nb::dlpack::dtype dtype = array_dtype(code, found.itemsize);
    if (which != 'A') {
      if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && !is_unsigned(code)) {
        ValueReader::refuse("an array has a dtype that NumPy does not know");
      }
      nb::object made = codec.arrays.make(elements, shape, dtype, std::move(owner));
      return which == 'g' ? nb::object(made[nb::tuple()]) : made;
    }
    // By way of NumPy: several times as fast as torch's own DLPack import.
    codec.need_torch();
    if (code == kUint64) dtype.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Int);  // it knows one name of two
    const nb::object plain = codec.arrays.make(elements, shape, dtype, std::move(owner));
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
