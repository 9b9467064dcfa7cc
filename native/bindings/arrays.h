// Array arguments of the store: taken as they are (noconvert), never copied silently.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <span>

#include "ucm/block_id.h"

namespace ucm::bindings {

namespace nb = nanobind;

using IdArray = nb::ndarray<const std::uint8_t, nb::shape<-1, 16>, nb::c_contig, nb::device::cpu>;
using ShardArray = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AddressArray = nb::ndarray<const std::uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutArray = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline std::span<const BlockId> id_span(const IdArray& a) {
  static_assert(alignof(BlockId) == 1);
  return {reinterpret_cast<const BlockId*>(a.data()), a.shape(0)};
}

inline BlockId one_id(const nb::bytes& b) {
  if (b.size() != sizeof(BlockId)) throw nb::value_error("an id is 16 bytes");
  BlockId id;
  std::memcpy(id.bytes.data(), b.data(), sizeof id);
  return id;
}

}  // namespace ucm::bindings
