#include "posix_kit.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "posix/names.h"

namespace ucm::posix_test {

TempDir::TempDir(const std::string& base) {
  const char* env = std::getenv("TMPDIR");
  std::string form = (base.empty() ? std::string(env ? env : "/tmp") : base) + "/ucm-posix-XXXXXX";
  if (mkdtemp(form.data()) == nullptr) throw std::runtime_error("mkdtemp " + form);
  path_ = form;
}

TempDir::~TempDir() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

BlockId id_of(std::uint64_t n) {
  BlockId id;
  std::uint64_t a = (n + 1) * 0x9E3779B97F4A7C15ULL;
  a = (a ^ (a >> 31)) * 0xBF58476D1CE4E5B9ULL;
  a ^= a >> 29;
  std::memcpy(id.bytes.data(), &a, 8);
  std::memcpy(id.bytes.data() + 8, &n, 8);
  return id;
}

Region::Region(const Geometry& g)
    : g_(g), data_(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, g.object_bytes()))) {
  std::memset(data_.get(), 0xEE, g.object_bytes());
}

namespace {

std::uint64_t word_at(const BlockId& id, std::uint32_t shard, std::uint64_t i) {
  return (id.word() ^ (std::uint64_t{shard} << 48)) + i * 0x9E3779B97F4A7C15ULL;
}

}  // namespace

void Region::fill(const BlockId& id) {
  for (std::uint32_t s = 0; s < g_.shard_count; ++s) {
    std::byte* p = data_.get() + g_.shard_offset(s);
    for (std::uint64_t i = 0; i < g_.shard_bytes; i += 8) {
      const std::uint64_t w = word_at(id, s, i);
      std::memcpy(p + i, &w, std::min<std::uint64_t>(8, g_.shard_bytes - i));
    }
  }
}

bool Region::holds(const BlockId& id, std::uint32_t begin, std::uint32_t end) const {
  for (std::uint32_t s = begin; s < end; ++s) {
    const std::byte* p = data_.get() + g_.shard_offset(s);
    for (std::uint64_t i = 0; i < g_.shard_bytes; i += 8) {
      const std::uint64_t w = word_at(id, s, i);
      if (std::memcmp(p + i, &w, std::min<std::uint64_t>(8, g_.shard_bytes - i)) != 0) return false;
    }
  }
  return true;
}

void Results::put(std::uint64_t cookie, Outcome o) noexcept {
  std::scoped_lock lock(mutex_);
  EXPECT_LT(cookie, expected_);
  EXPECT_EQ(outcomes_[cookie].status, Status::kPending) << "answered twice: " << cookie;
  outcomes_[cookie] = o;
  ++arrived_;
  done_.notify_all();
}

bool Results::wait(milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return done_.wait_for(lock, timeout, [&] { return arrived_ == expected_; });
}

Outcome Results::at(std::size_t i) const {
  std::scoped_lock lock(mutex_);
  return outcomes_.at(i);
}

std::size_t Results::count(Status s) const {
  std::scoped_lock lock(mutex_);
  std::size_t n = 0;
  for (const auto& o : outcomes_) n += o.status == s;
  return n;
}

Outcome Harness::write(const BlockId& id, milliseconds timeout) {
  const Region from(geometry, id);
  auto results = std::make_shared<Results>(1);
  const WriteOp op{id, from.data(), 0};
  stage->write({&op, 1}, results, in(timeout));
  EXPECT_TRUE(results->wait());
  return results->at(0);
}

Outcome Harness::read(const BlockId& id, Region& into, milliseconds timeout) {
  auto results = std::make_shared<Results>(1);
  const ReadOp op{id, into.data(), 0, geometry.shard_count, 0, true};
  stage->read({&op, 1}, results, in(timeout));
  EXPECT_TRUE(results->wait());
  return results->at(0);
}

Outcome Harness::read(const BlockId& id) {
  Region into(geometry);
  const Outcome o = read(id, into);
  if (o.status == Status::kOk) {
    EXPECT_TRUE(into.holds(id)) << "wrong bytes delivered";
  }
  return o;
}

bool Harness::present(const BlockId& id) {
  std::uint8_t p = 9;
  stage->lookup({&id, 1}, {&p, 1}, false);
  EXPECT_LE(p, 1);
  return p == 1;
}

fs::path object_path(const fs::path& root, const BlockId& id, const std::string& ns) {
  return root / ns / posix::ObjectPath(id).c_str();
}

std::size_t count_files(const fs::path& root,
                        const std::function<bool(const std::string&)>& match) {
  std::size_t n = 0;
  std::error_code ec;
  for (fs::recursive_directory_iterator it(root, ec), end; it != end; it.increment(ec)) {
    if (ec) break;
    if (!it->is_directory(ec) && match(it->path().filename().string())) ++n;
  }
  return n;
}

std::size_t count_temps(const fs::path& root) {
  return count_files(root, [](const std::string& name) { return name.starts_with(".tmp-"); });
}

void flip_byte(const fs::path& file, std::uint64_t offset) {
  const int fd = ::open(file.c_str(), O_RDWR);
  ASSERT_GE(fd, 0) << file;
  char c = 0;
  ASSERT_EQ(pread(fd, &c, 1, static_cast<off_t>(offset)), 1);
  c = static_cast<char>(c ^ 0x40);
  ASSERT_EQ(pwrite(fd, &c, 1, static_cast<off_t>(offset)), 1);
  fsync(fd);
  ::close(fd);
}

bool eventually(const std::function<bool()>& condition, milliseconds timeout) {
  const auto end = in(timeout);
  while (Clock::now() < end) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return condition();
}

}  // namespace ucm::posix_test
