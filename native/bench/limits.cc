// Physical limits for the benchmarks, as a co-process: one command a line on stdin, one JSON object
// a line on stdout. The harness alternates one repetition here with one repetition of the store, so
// that noise of the machine hits both alike. Memory set up for a command is kept for the next call.
#include <cstdio>
#include <functional>
#include <iostream>
#include <sstream>

#include "meter.h"
#include "ucm/copy.h"

namespace ucm::bench {

Args::Args(const std::string& text) {
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const auto equals = word.find('=');
    if (equals == std::string::npos) throw std::runtime_error("not key=value: " + word);
    values_[word.substr(0, equals)] = word.substr(equals + 1);
  }
}

std::string Args::text(const std::string& key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) throw std::runtime_error("missing argument: " + key);
  return found->second;
}

std::uint64_t Args::number(const std::string& key) const {
  const std::string value = text(key);
  std::size_t used = 0;
  const std::uint64_t parsed = std::stoull(value, &used);
  if (used != value.size()) throw std::runtime_error(key + " is not a number: " + value);
  return parsed;
}

namespace {

const std::map<std::string, std::function<Report(const Args&)>>& commands() {
  static const std::map<std::string, std::function<Report(const Args&)>> all{
      {"copy", copy_limit},
      {"read_one_file", read_one_file},
      {"write_one_file", write_one_file},
      {"read_files", read_files},
      {"write_files", write_files},
      {"stat_files", stat_files},
      {"hash_chain", hash_chain},
      {"pack_shards", pack_shards},
  };
  return all;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + '"';
}

void answer(const std::string& line) {
  const auto blank = line.find(' ');
  const std::string name = line.substr(0, blank);
  try {
    if (name == "info") {
      std::printf("{\"copy_kernel\": %s}\n", quoted(copy_kernel_name()).c_str());
      return;
    }
    const auto command = commands().find(name);
    if (command == commands().end()) throw std::runtime_error("unknown command: " + name);
    const Report r =
        command->second(Args(blank == std::string::npos ? std::string() : line.substr(blank)));
    std::printf("{\"wall_s\": %.9f, \"cpu_s\": %.6f, \"operations\": %llu, \"bytes\": %llu}\n",
                r.cost.wall_s, r.cost.cpu_s, static_cast<unsigned long long>(r.operations),
                static_cast<unsigned long long>(r.bytes));
  } catch (const std::exception& error) {
    std::printf("{\"error\": %s}\n", quoted(name + ": " + error.what()).c_str());
  }
}

}  // namespace
}  // namespace ucm::bench

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    ucm::bench::answer(line);
    std::fflush(stdout);
  }
  return 0;
}
