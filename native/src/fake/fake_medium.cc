#include "ucm/fake_stage.h"

namespace ucm {

bool FakeMedium::put(const BlockId& id, Object object) {
  const std::lock_guard lock(mu_);
  const auto it = objects_.find(id);
  if (it != objects_.end()) return true;  // already stored is success
  if (capacity_ != 0 && objects_.size() >= capacity_) return false;
  objects_.emplace(id, std::move(object));
  return true;
}

std::optional<FakeMedium::Object> FakeMedium::get(const BlockId& id) const {
  const std::lock_guard lock(mu_);
  const auto it = objects_.find(id);
  if (it == objects_.end()) return std::nullopt;
  return it->second;
}

bool FakeMedium::contains(const BlockId& id) const {
  const std::lock_guard lock(mu_);
  return objects_.contains(id);
}

std::vector<BlockId> FakeMedium::ids() const {
  const std::lock_guard lock(mu_);
  std::vector<BlockId> out;
  out.reserve(objects_.size());
  for (const auto& [id, object] : objects_) out.push_back(id);
  return out;
}

bool FakeMedium::remove(const BlockId& id) {
  const std::lock_guard lock(mu_);
  return objects_.erase(id) != 0;
}

bool FakeMedium::corrupt(const BlockId& id, std::size_t offset) {
  const std::lock_guard lock(mu_);
  const auto it = objects_.find(id);
  if (it == objects_.end() || offset >= it->second.data.size()) return false;
  it->second.data[offset] ^= std::byte{0x40};
  return true;
}

bool FakeMedium::truncate(const BlockId& id, std::size_t bytes) {
  const std::lock_guard lock(mu_);
  const auto it = objects_.find(id);
  if (it == objects_.end() || bytes > it->second.data.size()) return false;
  it->second.data.resize(bytes);
  return true;
}

bool FakeMedium::swap(const BlockId& a, const BlockId& b) {
  const std::lock_guard lock(mu_);
  const auto at_a = objects_.find(a);
  const auto at_b = objects_.find(b);
  if (at_a == objects_.end() || at_b == objects_.end()) return false;
  std::swap(at_a->second, at_b->second);
  return true;
}

void FakeMedium::clear() {
  const std::lock_guard lock(mu_);
  objects_.clear();
}

void FakeMedium::set_capacity(std::size_t objects) {
  const std::lock_guard lock(mu_);
  capacity_ = objects;
}

std::size_t FakeMedium::size() const {
  const std::lock_guard lock(mu_);
  return objects_.size();
}

}  // namespace ucm
