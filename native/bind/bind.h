// What the binding files share: array types, and turning native memory into arrays that keep it alive.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "store.h"

namespace geartrain {

namespace nb = nanobind;

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Any dtype, C order, in host memory: a NumPy array, a torch tensor, anything with DLPack.
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
using AnyConstArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> view(const In<T>& array) {
  return {array.data(), array.size()};
}

template <typename T>
std::span<const T> view(const std::optional<In<T>>& array) {
  return array ? std::span<const T>{array->data(), array->size()} : std::span<const T>{};
}

// A NumPy array that owns a copy-free vector.
template <typename T>
nb::object to_numpy(std::vector<T>&& values) {
  auto* moved = new std::vector<T>(std::move(values));
  nb::capsule owner(moved, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  const size_t shape[1] = {moved->size()};
  return nb::cast(nb::ndarray<nb::numpy, T>(moved->data(), 1, shape, owner));
}

// The element type of a stored dtype code: NumPy's where it has one, an unsigned integer of that size where not.
nb::dlpack::dtype array_dtype(uint8_t code, uint8_t itemsize);

// Keeps a mapping alive for as long as an array over it lives.
nb::capsule keep_alive(std::shared_ptr<Mapping> mapping);

void bind_store(nb::module_& module);
void bind_fetch(nb::module_& module);
void bind_selection(nb::module_& module);
void bind_bench(nb::module_& module);

}  // namespace geartrain
