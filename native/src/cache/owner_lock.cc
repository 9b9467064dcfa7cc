// Locks that know their owner: a process that dies with one does not keep the others out.
#include "cache/owner_word.h"
#include "cache/segment.h"
#include "chaos/hooks.h"

namespace ucm::cache {

bool Segment::try_lock(Shared<std::uint32_t>& word) noexcept {
  return owner_word::try_lock(word, self_);
}

bool Segment::lock(Shared<std::uint32_t>& word) noexcept {
  const bool held = owner_word::lock(word, self_, [this](std::uint32_t owner) noexcept {
    if (!alive(owner)) break_locks(owner);
  });
  if (held) UCM_CHAOS_POINT(kLockHeld);
  return held;
}

void Segment::unlock(Shared<std::uint32_t>& word) noexcept { owner_word::unlock(word); }

void Segment::break_locks(std::uint32_t dead) noexcept {
  owner_word::break_lock(header_->extent_lock, dead);
  for (auto& c : header_->geometry) owner_word::break_lock(c.lock, dead);
  for (std::uint32_t i = 0; i < header_->buckets; ++i) {
    owner_word::break_lock(buckets_[i].lock, dead);
  }
}

}  // namespace ucm::cache
