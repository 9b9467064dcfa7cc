#include "checker.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <optional>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "content.h"

namespace ucm::chaos {
namespace {

namespace fs = std::filesystem;

struct Key {
  std::uint32_t shape;
  std::uint32_t key;
};

std::string hex(const void* id) {
  std::string name;
  char digits[3];
  for (int i = 0; i < 16; ++i) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(id)[i]);
    name += digits;
  }
  return name;
}

const std::map<std::string, Key>& names() {
  static const auto all = [] {
    std::map<std::string, Key> m;
    for (std::uint32_t s = 0; s < kShapes; ++s) {
      for (std::uint32_t k = 0; k < kKeys; ++k) m[hex(id_of(s, k).bytes.data())] = {s, k};
    }
    return m;
  }();
  return all;
}

/// All files below `root`; what vanishes meanwhile is left out.
std::vector<fs::path> files_below(const std::string& root) {
  std::vector<fs::path> out;
  std::error_code ec;
  for (auto it = fs::recursive_directory_iterator(root, ec); !ec && it != fs::end(it);
       it.increment(ec)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored)) out.push_back(it->path());
  }
  return out;
}

std::optional<std::vector<std::byte>> slurp(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  struct stat st {};
  std::vector<std::byte> bytes;
  if (::fstat(fd, &st) == 0) {
    bytes.resize(static_cast<std::size_t>(st.st_size));
    const ssize_t n = ::pread(fd, bytes.data(), bytes.size(), 0);
    bytes.resize(n < 0 ? 0 : static_cast<std::size_t>(n));
  }
  ::close(fd);
  return bytes;
}

template <typename T>
T at(const std::vector<std::byte>& file, std::size_t offset) {
  T value{};
  if (offset + sizeof value <= file.size()) std::memcpy(&value, file.data() + offset, sizeof value);
  return value;
}

/// Empty: the file (or slot of a slab) is exactly the object of this key. Offsets as the format's page
/// states them.
std::string judge(const std::vector<std::byte>& file, Key key) {
  const Geometry g = geometry_of(key.shape);
  const std::uint64_t stride = (g.shard_bytes + 4095) / 4096 * 4096;
  if (file.size() != 4096 + g.shard_count * stride) {
    return "has " + std::to_string(file.size()) + " bytes";
  }
  if (std::memcmp(file.data(), "UCMFILE\n", 8) != 0) return "has no magic";
  if (at<std::uint32_t>(file, 8) != 1 || at<std::uint32_t>(file, 12) != 4096 ||
      at<std::uint64_t>(file, 16) != file.size() || at<std::uint64_t>(file, 24) != g.shard_bytes ||
      at<std::uint32_t>(file, 32) != g.shard_count) {
    return "has a header of something else";
  }
  const BlockId id = id_of(key.shape, key.key);
  if (std::memcmp(file.data() + 40, id.bytes.data(), 16) != 0) return "is another object";
  if (at<std::uint64_t>(file, 120) != XXH3_64bits(file.data(), 120)) return "has a torn header";
  for (std::uint32_t i = 0; i < g.shard_count; ++i) {
    const std::byte* const shard = file.data() + 4096 + i * stride;
    if (const auto wrong = wrong_bytes(shard, key.shape, key.key, i, g.shard_bytes); wrong != 0) {
      return std::to_string(wrong) + " wrong bytes in shard " + std::to_string(i);
    }
    if (at<std::uint64_t>(file, 128 + std::size_t{8} * i) != XXH3_64bits(shard, g.shard_bytes)) {
      return "has a wrong checksum of shard " + std::to_string(i);
    }
  }
  return {};
}

class Checker {
 public:
  explicit Checker(Board& board) : board_(board) {}

  void object(const std::vector<std::byte>& bytes, Key key, const std::string& where) {
    board_.add(Count::kFilesChecked);
    seen[key.shape][key.key] = true;
    if (board_.key[key.shape][key.key].damaged.load() != 0) return;
    if (const std::string why = judge(bytes, key); !why.empty()) {
      board_.report("a visible object " + why + ": " + where);
    }
  }

  /// Every slot whose head is sound and of the file's epoch holds an object.
  void slab(const std::vector<std::byte>& file, const std::string& where) {
    if (file.size() < 4096 || std::memcmp(file.data(), "UCMSLAB\n", 8) != 0)
      return;  // no geometry yet
    if (at<std::uint64_t>(file, 120) != XXH3_64bits(file.data(), 120)) return;
    const auto slot_bytes = at<std::uint64_t>(file, 24), epoch = at<std::uint64_t>(file, 104);
    const std::uint64_t slots = at<std::uint32_t>(file, 44), group = at<std::uint32_t>(file, 48);
    const std::uint64_t heads = align_up(128 + at<std::uint32_t>(file, 52), 4096);
    const std::uint64_t data = heads + (slots + group - 1) / group * 4096;
    for (std::uint64_t slot = 0; slot < slots; ++slot) {
      const std::size_t head = heads + slot / group * 4096 + slot % group * 64;
      if (head + 64 > file.size() || std::memcmp(file.data() + head, "SLOT", 4) != 0) continue;
      if (at<std::uint64_t>(file, head + 56) != XXH3_64bits(file.data() + head, 56)) continue;
      const std::size_t begin = data + slot * slot_bytes;
      if (at<std::uint64_t>(file, head + 32) != epoch || begin + slot_bytes > file.size()) continue;
      const auto known = names().find(hex(file.data() + head + 8));
      const std::string which = where + " slot " + std::to_string(slot);
      if (known == names().end()) {
        board_.report("a slot has an object that nobody stored: " + which);
        continue;
      }
      object({file.begin() + static_cast<std::ptrdiff_t>(begin),
              file.begin() + static_cast<std::ptrdiff_t>(begin + slot_bytes)},
             known->second, which);
    }
  }

  bool seen[kShapes][kKeys] = {};

 private:
  Board& board_;
};

}  // namespace

void check_files(const Plan& plan, Board& board) {
  Checker checker(board);
  for (const fs::path& path : files_below(plan.root)) {
    const auto known = names().find(path.filename());
    const bool slab = path.filename().string().starts_with("slab-");
    if (known == names().end() && !slab) continue;
    const auto file = slurp(path);
    if (!file) continue;
    if (slab) {
      checker.slab(*file, path.string());
    } else {
      checker.object(*file, known->second, path.string());
    }
  }
  if (plan.may_lose()) return;
  for (std::uint32_t s = 0; s < kShapes; ++s) {
    for (std::uint32_t k = 0; k < kKeys; ++k) {
      if (board.key[s][k].stored.load() != 0 && !checker.seen[s][k]) {
        board.report("a durable object has no file: shape " + std::to_string(s) + " key " +
                     std::to_string(k));
      }
    }
  }
}

std::uint64_t count_temporaries(const std::string& root) {
  std::uint64_t n = 0;
  for (const fs::path& path : files_below(root)) {
    n += path.filename().string().starts_with(".tmp-") ? 1 : 0;
  }
  return n;
}

std::string some_file(const Plan& plan, Random& random) {
  const auto files = files_below(plan.root);
  for (int attempt = 0; attempt < 8 && !files.empty(); ++attempt) {
    const fs::path& path = files[random() % files.size()];
    const bool slab = path.filename().string().starts_with("slab-");
    if (slab || names().contains(path.filename())) return path;
  }
  return {};
}

bool flip_a_file(const Plan& plan, Board& board, Random& random) {
  const fs::path path = some_file(plan, random);
  const int fd = path.empty() ? -1 : ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  // Said first: whoever reads it from here on may find it damaged. A slab may have any key's bytes there.
  const auto known = names().find(path.filename());
  for (auto& shape : board.key) {
    for (auto& key : shape) {
      const bool it =
          known == names().end() || &key == &board.key[known->second.shape][known->second.key];
      if (it) key.damaged.store(1);
    }
  }
  struct stat st {};
  unsigned char c = 0;
  bool done = false;
  if (::fstat(fd, &st) == 0 && st.st_size > 0) {
    const auto where = static_cast<off_t>(random() % static_cast<std::uint64_t>(st.st_size));
    if (::pread(fd, &c, 1, where) == 1) {
      c = static_cast<unsigned char>(c ^ (1U << (random() % 8)));
      done = ::pwrite(fd, &c, 1, where) == 1;
    }
  }
  ::close(fd);
  if (done) board.add(Count::kFlips);
  return done;
}

void jump_clocks(const Plan& plan, Random& random) {
  for (const fs::path& path : files_below(plan.root)) {
    const std::string name = path.filename();
    if (!name.starts_with(".tmp-") && name != ".ucm-gc") continue;
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    now.tv_sec += static_cast<time_t>(random() % 172'800) - 86'400;
    const timespec times[2] = {{0, UTIME_OMIT}, now};
    (void)::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW);
  }
}

}  // namespace ucm::chaos
