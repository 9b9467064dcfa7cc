#include "posix/scan.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <memory>

namespace ucm::posix {
namespace {

constexpr std::size_t kKeepAtLeast = 64;  // candidates per directory
constexpr int kDirFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;

struct DirCloser {
  void operator()(DIR* d) const noexcept { closedir(d); }
};
using Dir = std::unique_ptr<DIR, DirCloser>;

std::int64_t nanos(const timespec& t) noexcept {
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

class Scanner {
 public:
  Scanner(Core& core, const ScanOptions& options, Usage& usage)
      : core_(core), options_(options), usage_(usage) {}

  void root(const Root& root) {
    const Dir dir = open_dir(AT_FDCWD, root.path().c_str(), root.path());
    if (!dir) return;
    while (const dirent* entry = readdir(dir.get())) {
      if (options_.stop && options_.stop()) return;
      const std::string_view name = entry->d_name;
      if (name.starts_with(kTempPrefix)) {
        temporary(dirfd(dir.get()), entry->d_name, root.path());
        continue;
      }
      if (name.starts_with(".") || (entry->d_type != DT_DIR && entry->d_type != DT_UNKNOWN))
        continue;
      name_space(dirfd(dir.get()), entry->d_name, root.path() + "/" + entry->d_name);
    }
  }

 private:
  Dir open_dir(int at, const char* name, const std::string& path) {
    Fd fd(openat(at, name, kDirFlags));
    if (!fd) {
      if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP) failed("opendir", path, errno);
      return nullptr;
    }
    Dir dir(fdopendir(fd.get()));
    if (dir) (void)fd.release();
    return dir;
  }

  void failed(const char* operation, const std::string& path, int error) {
    core_.counters.add(Counter::kGcErrors);
    core_.errors.add(operation, path, error);
  }

  void name_space(int at, const char* name, const std::string& path) {
    const Dir dir = open_dir(at, name, path);
    if (!dir) return;
    const int fd = dirfd(dir.get());
    struct stat st {};
    if (fstatat(fd, kNamespaceMark.data(), &st, AT_SYMLINK_NOFOLLOW) < 0) return;  // not ours
    while (const dirent* entry = readdir(dir.get())) {
      if (std::string_view(entry->d_name).starts_with(kTempPrefix)) {
        temporary(fd, entry->d_name, path);
      }
    }
    for (unsigned i = 0; i < kFanout; ++i) {
      if (options_.stop && options_.stop()) return;
      const FanoutName fanout(i);
      if (i % options_.sample != options_.sample_turn % options_.sample) continue;
      ++usage_.fanouts_there;
      this->fanout(fd, fanout, path + "/" + fanout.text);
    }
  }

  void fanout(int at, const FanoutName& name, const std::string& path) {
    const Dir dir = open_dir(at, name.text, path);
    if (!dir) return;
    ++usage_.fanouts_seen;
    const int fd = dirfd(dir.get());
    const std::size_t first = usage_.candidates.size();
    const auto index = static_cast<std::uint32_t>(usage_.directories.size());
    while (const dirent* entry = readdir(dir.get())) {
      const std::string_view text = entry->d_name;
      if (text.starts_with(kTempPrefix)) {
        temporary(fd, entry->d_name, path);
        continue;
      }
      Candidate c;
      if (!parse_object_name(text, c.id) || text.substr(0, 2) != name.text) continue;
      struct stat st {};
      if (fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno != ENOENT) failed("stat", path + "/" + entry->d_name, errno);
        continue;
      }
      if (!S_ISREG(st.st_mode)) continue;
      c.atime_ns = nanos(st.st_atim);
      c.bytes = static_cast<std::uint64_t>(st.st_size);
      c.directory = index;
      usage_.bytes += c.bytes;
      ++usage_.files;
      if (options_.candidates) usage_.candidates.push_back(c);
    }
    if (usage_.candidates.size() == first) return;
    usage_.directories.push_back(path);
    // Only the coldest share of each directory goes on: bounds memory for millions of files. Small
    // directories go on whole, so that the choice among few files is exact.
    const std::size_t n = usage_.candidates.size() - first;
    const auto share = std::ceil(static_cast<double>(n) * options_.keep_share);
    const std::size_t keep = std::min(n, std::max(kKeepAtLeast, static_cast<std::size_t>(share)));
    const auto begin = usage_.candidates.begin() + static_cast<std::ptrdiff_t>(first);
    std::nth_element(
        begin, begin + static_cast<std::ptrdiff_t>(keep - 1), usage_.candidates.end(),
        [](const Candidate& a, const Candidate& b) { return a.atime_ns < b.atime_ns; });
    usage_.candidates.resize(first + keep);
  }

  void temporary(int fd, const char* name, const std::string& path) {
    struct stat st {};
    if (fstatat(fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0) return;
    ++usage_.temporaries;
    usage_.bytes += static_cast<std::uint64_t>(st.st_size);
    const std::int64_t written = nanos(st.st_mtim);
    if (options_.orphans_before_ns == 0) return;
    if (written >= options_.orphans_before_ns && written <= options_.orphans_after_ns) return;
    if (unlinkat(fd, name, 0) == 0) {
      core_.counters.add(Counter::kOrphansRemoved);
      usage_.bytes -= static_cast<std::uint64_t>(st.st_size);
      --usage_.temporaries;
    } else if (errno != ENOENT) {
      failed("unlink", path + "/" + name, errno);
    }
  }

  Core& core_;
  const ScanOptions& options_;
  Usage& usage_;
};

}  // namespace

void scan_root(Core& core, const Root& root, const ScanOptions& options, Usage& usage) {
  Scanner(core, options, usage).root(root);
}

}  // namespace ucm::posix
