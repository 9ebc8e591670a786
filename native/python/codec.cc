// Codec (geartrain._native.Codec): values as a header and buffers, and back, without executing anything received.
//
// A value is one type byte, followed by its content; numbers are little-endian:
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
//   x  u8 kind, value             what torch makes of a value: 0 Size of a tuple, 1 dtype of its name, 2 device of its
//   name,
//                                 3 nested tensor of (layout, list of tensors)
//   p  u32 n, u32 k, n bytes      a pickle of protocol 5 with k out-of-band buffers; only where that is allowed
//
// Small arrays are inline, large ones are the message's buffers, used once each and in order: what is sent is not
// copied here, and an array that was received is a view of the message's memory. Dtypes are core/dtypes.py's codes.
//
// The decoder is safe against any bytes: it reads within bounds, uses memory and time in proportion to the bytes that
// came, whatever they claim (transport/value_reader.h), and goes down to the depth that was set. Keys that collide are
// refused, unless the peer may send pickles. Any malformed input is one error, of kind frame.

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>

#include "python/codec.h"

namespace geartrain {
namespace {

Arrived* arrived_from(const nb::bytes& header, const nb::list& buffers) {
  auto made = std::make_unique<Arrived>();
  Payload parts;
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

bool is_message_error(nb::handle error) {
  return nb::isinstance(error, nb::module_::import_("geartrain.errors").attr("MessageError"));
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

// The kind and payload of a call or of its answer.
nb::object encoded_message(const Codec& codec, uint32_t kind, nb::handle value, bool pickle, nb::handle tensors,
                           uint64_t tag, double until_s) {
  auto payload = std::make_unique<Payload>();
  const uint32_t found = codec.encode_message(kind, value, pickle, tensors, tag, until_s, payload.get());
  return nb::make_tuple(found, nb::cast(payload.release(), nb::rv_policy::take_ownership));
}

}  // namespace

Codec::Codec(nb::dict numpy_codes, const nb::dict& itemsizes, nb::object torch_part, nb::object dumps, nb::object loads,
             uint32_t max_depth) {
  const nb::module_ numpy = nb::module_::import_("numpy");
  types_.names.numpy_array = numpy.attr("ndarray");
  types_.names.numpy_scalar = numpy.attr("generic");
  types_.names.as_array = numpy.attr("asarray");
  types_.names.as_contiguous = numpy.attr("ascontiguousarray");
  types_.names.numpy_codes = std::move(numpy_codes);
  for (const auto& [code, size] : itemsizes) types_.itemsizes.at(nb::cast<uint8_t>(code)) = nb::cast<uint8_t>(size);
  types_.torch_part = std::move(torch_part);
  types_.dumps = std::move(dumps);
  types_.loads = std::move(loads);
  types_.max_depth = max_depth;
}

Payload* Codec::encode(nb::handle value, bool pickle) const {
  auto payload = std::make_unique<Payload>();
  geartrain::encode(types_, value, pickle, payload.get());
  return payload.release();
}

nb::object Codec::decode(const Message& message, bool pickle) const {
  return geartrain::decode(types_, message, pickle);
}

uint32_t Codec::encode_message(uint32_t kind, nb::handle value, bool pickle, nb::handle tensors, uint64_t tag,
                               double until_s, Payload* payload) const {
  nb::object refusal;
  try {
    geartrain::encode(types_, value, pickle, payload);
    if (payload->bytes() < kOutOfBandBytes) return kind;
  } catch (...) {
    refusal = caught();
  }
  const bool encodable = !refusal.is_valid();
  nb::object instead = nb::none();
  if (encodable || is_message_error(refusal)) instead = tensors.attr("out_of_band")(value, encodable, tag, until_s);
  if (!instead.is_none()) {
    const auto given = nb::cast<nb::tuple>(instead);
    payload->clear();
    geartrain::encode(types_, given[1], pickle, payload);
    return kind | nb::cast<uint32_t>(given[0]);
  }
  if (encodable) return kind;
  PyErr_SetObject(refusal.type().ptr(), refusal.ptr());
  throw nb::python_error();
}

Codec::Decoded Codec::decode_message(const Message& message, bool pickle) const {
  try {
    return {decode(message, pickle), nb::none()};
  } catch (...) {
    return {nb::none(), caught()};
  }
}

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

  nb::class_<Payload>(module, "Payload")
      .def("__init__",
           [](Payload* self, const nb::bytes& header, const nb::list& buffers) {
             auto* made = new (self) Payload();
             const auto* begin = reinterpret_cast<const std::byte*>(header.c_str());
             made->header.assign(begin, begin + header.size());
             try {
               for (const nb::handle buffer : buffers) made->add(buffer);
             } catch (...) {
               made->~Payload();
               throw;
             }
           })
      .def_prop_ro("header",
                   [](const Payload& self) {
                     return nb::bytes(reinterpret_cast<const char*>(self.header.data()), self.header.size());
                   })
      .def_prop_ro("buffers",
                   [](nb::handle_t<Payload> self) {
                     nb::list out;
                     for (const Bytes& part : nb::cast<const Payload&>(self).buffers()) {
                       const size_t shape[1] = {part.size()};
                       out.append(nb::cast(nb::ndarray<nb::numpy, const uint8_t>(
                           reinterpret_cast<const uint8_t*>(part.data()), 1, shape, nb::borrow(self))));
                     }
                     return out;
                   })
      .def_prop_ro("nbytes", &Payload::bytes);

  nb::class_<Codec>(module, "Codec")
      .def(nb::init<nb::dict, const nb::dict&, nb::object, nb::object, nb::object, uint32_t>())
      .def("encode", &Codec::encode, nb::arg("value").none(), nb::arg("pickle") = false)
      .def(
          "decode",
          [](const Codec& codec, const Arrived& arrived, bool pickle) { return codec.decode(arrived.message, pickle); },
          nb::arg("message"), nb::arg("pickle") = false)
      .def("encode_message", &encoded_message, nb::arg("kind"), nb::arg("value").none(), nb::arg("pickle"),
           nb::arg("tensors"), nb::arg("tag"), nb::arg("until_s"));
  module.attr("OUT_OF_BAND_BYTES") = Codec::kOutOfBandBytes;
}

}  // namespace geartrain
