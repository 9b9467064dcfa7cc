#include "ucm/staging_tier.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "memory/populate.h"

namespace ucm {

StagingTier::StagingTier(Geometry geometry, std::uint32_t load_reserve, std::uint32_t shared)
    : geometry_(std::move(geometry)), load_reserve_(load_reserve), total_(load_reserve + shared) {
  if (load_reserve == 0 || shared == 0) {
    throw std::invalid_argument("staging: needs at least one buffer for loads and one for dumps");
  }
  const std::size_t bytes = geometry_.object_bytes() * total_;
  void* const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<std::byte*>(p);
  // A child after fork never uses the pool: do not make the parent's writes copy pages for it.
  (void)::madvise(p, bytes, MADV_DONTFORK);
  (void)::madvise(p, bytes, MADV_HUGEPAGE);
  // All pages now: the first touch of a page costs several copies, and the memory is known to be there.
  if (memory::populate(p, bytes, 0, memory::Touch::kWrite) != 0) {
    ::munmap(p, bytes);
    throw std::bad_alloc();
  }
  free_.reserve(total_);
  for (std::uint32_t i = total_; i > 0; --i) free_.push_back(i - 1);
}

StagingTier::~StagingTier() {
  // Buffers still pinned may be the target of I/O that never came back: keep the mapping.
  if (free_.size() == total_) ::munmap(base_, geometry_.object_bytes() * total_);
}

bool StagingTier::take(bool for_load, Slot& slot) noexcept {
  const std::lock_guard lock(mu_);
  if (free_.size() <= (for_load ? 0U : load_reserve_)) return false;
  const std::uint32_t index = free_.back();
  free_.pop_back();
  slot = {base_ + index * geometry_.object_bytes(), index};
  return true;
}

Status StagingTier::claim_load(const BlockId&, std::span<const std::uint32_t>, ClaimUse use,
                               std::uint64_t, std::span<ShardClaim> claims, Slot& slot) noexcept {
  if (!take(use == ClaimUse::kLoad, slot)) return Status::kRejected;
  std::fill(claims.begin(), claims.end(), ShardClaim::kOwned);
  return Status::kOk;
}

DumpClaim StagingTier::claim_dump(const BlockId&, Slot& slot,
                                  std::span<std::uint8_t> have) noexcept {
  if (!take(false, slot)) return DumpClaim::kNoRoom;
  std::fill(have.begin(), have.end(), std::uint8_t{0});
  return DumpClaim::kFill;
}

void StagingTier::release(const Slot& slot) noexcept {
  const std::lock_guard lock(mu_);
  free_.push_back(static_cast<std::uint32_t>(slot.handle));  // capacity reserved: cannot throw
}

std::map<std::string, std::uint64_t> StagingTier::stats() const {
  const std::lock_guard lock(mu_);
  return {{"buffers", total_},
          {"buffers_free", free_.size()},
          {"buffers_load_reserve", load_reserve_},
          {"buffer_bytes", geometry_.object_bytes()}};
}

}  // namespace ucm
