// Step two of identity: object ids from a group's seed and chain links.
#include <cstring>

#include "hash/sha256.h"
#include "ucm/hash.h"

namespace ucm::hash {

void object_ids(const Digest& seed, const std::uint8_t* links, std::size_t link_stride,
                std::size_t count, std::uint8_t* out) noexcept {
  Digest full;
  for (std::size_t i = 0; i < count; ++i) {
    Sha256{}
        .update(seed.data(), kDigestBytes)
        .update(links + i * link_stride, kDigestBytes)
        .finish(full.data());
    std::memcpy(out + i * kIdBytes, full.data(), kIdBytes);
  }
}

void snapshot_ids(const Digest& seed, const std::uint8_t* links, std::size_t link_stride,
                  std::span<const std::uint64_t> positions, std::uint8_t* out) noexcept {
  Digest full;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    Sha256{}
        .update(seed.data(), kDigestBytes)
        .update(links + i * link_stride, kDigestBytes)
        .update(&positions[i], sizeof(std::uint64_t))
        .finish(full.data());
    std::memcpy(out + i * kIdBytes, full.data(), kIdBytes);
  }
}

}  // namespace ucm::hash
