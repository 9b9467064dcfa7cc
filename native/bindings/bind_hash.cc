// Python face of ucm/hash.h. Arrays are taken as they are (noconvert): a wrong dtype, rank or stride
// is a TypeError, never a silent copy. The GIL is released around the hashing.
#include <nanobind/ndarray.h>

#include <cstring>
#include <span>
#include <vector>

#include "module.h"
#include "ucm/hash.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {
namespace {

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows32 = nb::ndarray<const std::uint8_t, nb::shape<-1, 32>, nb::device::cpu>;
using OutLinks = nb::ndarray<std::uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<std::uint8_t, nb::shape<-1, 16>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> as_span(const Array1<T>& a) {
  return {a.data(), a.shape(0)};
}

std::span<const std::uint8_t> as_span(const nb::bytes& b) {
  return {static_cast<const std::uint8_t*>(b.data()), b.size()};
}

hash::Digest seed_of(const nb::bytes& seed) {
  if (seed.size() != hash::kDigestBytes) throw nb::value_error("seed must be 32 bytes");
  hash::Digest d;
  std::memcpy(d.data(), seed.data(), d.size());
  return d;
}

void extend(const nb::bytes& previous, const Array1<std::uint64_t>& pending, hash::Tokens tokens,
            std::uint64_t block, const Array1<std::uint64_t>& extra_links,
            const Rows32& extra_digests, const OutLinks& out) {
  if (previous.size() != 0 && previous.size() != hash::kDigestBytes)
    throw nb::value_error("previous must be empty or 32 bytes");
  if (block == 0) throw nb::value_error("block must be at least 1");
  tokens.pending = as_span(pending);
  const std::size_t links = out.shape(0);
  if (tokens.size() / block < links) throw nb::value_error("fewer whole blocks than rows of out");
  if (extra_links.shape(0) != extra_digests.shape(0))
    throw nb::value_error("extra_links and extra_digests differ in length");
  std::vector<hash::Extra> extras(extra_links.shape(0));
  for (std::size_t i = 0; i < extras.size(); ++i) {
    extras[i] = {extra_links.data()[i], extra_digests.data() + i * extra_digests.stride(0)};
    if (extras[i].link >= links || (i > 0 && extras[i].link <= extras[i - 1].link))
      throw nb::value_error("extra_links must ascend and lie within the links of this call");
  }
  if (extra_digests.shape(0) > 0 && extra_digests.stride(1) != 1)
    throw nb::value_error("extra_digests rows must be contiguous");
  const auto prev = as_span(previous);
  const std::span<std::uint8_t> target{out.data(), links * hash::kDigestBytes};
  nb::gil_scoped_release release;
  hash::extend_chain(prev, tokens, block, extras, target);
}

void check_rows(const Rows32& links, std::size_t rows) {
  if (links.shape(0) != rows) throw nb::value_error("links and out differ in length");
  if (rows > 0 && (links.stride(1) != 1 || links.stride(0) < 0))
    throw nb::value_error("links rows must be contiguous and in order");
}

}  // namespace

void bind_hash(nb::module_& m) {
  auto h = m.def_submodule("hash", "Content chain and object ids; see ucm/hash.h");
  h.def(
      "extend_chain_u32",
      [](const nb::bytes& previous, const Array1<std::uint64_t>& pending,
         const Array1<std::uint32_t>& tokens, std::uint64_t block,
         const Array1<std::uint64_t>& extra_links, const Rows32& extra_digests,
         const OutLinks& out) {
        hash::Tokens t;
        t.narrow = as_span(tokens);
        extend(previous, pending, t, block, extra_links, extra_digests, out);
      },
      "previous"_a, "pending"_a.noconvert(), "tokens"_a.noconvert(), "block"_a,
      "extra_links"_a.noconvert(), "extra_digests"_a.noconvert(), "out"_a.noconvert(),
      "Fill out[n, 32] with the next n links over pending then tokens (uint32).");
  h.def(
      "extend_chain_u64",
      [](const nb::bytes& previous, const Array1<std::uint64_t>& pending,
         const Array1<std::uint64_t>& tokens, std::uint64_t block,
         const Array1<std::uint64_t>& extra_links, const Rows32& extra_digests,
         const OutLinks& out) {
        hash::Tokens t;
        t.wide = as_span(tokens);
        extend(previous, pending, t, block, extra_links, extra_digests, out);
      },
      "previous"_a, "pending"_a.noconvert(), "tokens"_a.noconvert(), "block"_a,
      "extra_links"_a.noconvert(), "extra_digests"_a.noconvert(), "out"_a.noconvert(),
      "The same for uint64 ids; a block with an id over 2**32-1 is written wide.");
  h.def(
      "object_ids",
      [](const nb::bytes& seed, const Rows32& links, const OutIds& out) {
        const hash::Digest s = seed_of(seed);
        check_rows(links, out.shape(0));
        nb::gil_scoped_release release;
        hash::object_ids(s, links.data(), static_cast<std::size_t>(links.stride(0)), out.shape(0),
                         out.data());
      },
      "seed"_a, "links"_a.noconvert(), "out"_a.noconvert(),
      "Fill out[n, 16] with the ids of links[n, 32] (rows may be strided).");
  h.def(
      "snapshot_ids",
      [](const nb::bytes& seed, const Rows32& links, const Array1<std::uint64_t>& positions,
         const OutIds& out) {
        const hash::Digest s = seed_of(seed);
        check_rows(links, out.shape(0));
        if (positions.shape(0) != out.shape(0))
          throw nb::value_error("positions and out differ in length");
        const auto pos = as_span(positions);
        nb::gil_scoped_release release;
        hash::snapshot_ids(s, links.data(), static_cast<std::size_t>(links.stride(0)), pos,
                           out.data());
      },
      "seed"_a, "links"_a.noconvert(), "positions"_a.noconvert(), "out"_a.noconvert(),
      "Fill out[n, 16] with the snapshot ids of links[n, 32] at positions[n].");
}

}  // namespace ucm::bindings
