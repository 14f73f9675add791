// SPDX-License-Identifier: Apache-2.0
// Shared memory of the running block, and who touched it when.
#include <algorithm>
#include <memory>
#include <vector>

#include "simt.h"

namespace simt {
namespace {

struct Array {
  const void* tag;
  std::unique_ptr<char[]> storage;
  std::size_t counted;
  std::uint64_t block;  // when it was last declared
};

std::vector<Array> arrays;

}  // namespace

void* shared_storage(const void* tag, std::size_t bytes, std::size_t counted) {
  auto found = std::find_if(arrays.begin(), arrays.end(), [&](const Array& a) { return a.tag == tag; });
  if (found == arrays.end()) {
    // Zeros stand for elements that nobody wrote: every moment of a block is later than 0.
    arrays.push_back({tag, std::make_unique<char[]>(bytes), counted, 0});
    found = arrays.end() - 1;
  }
  if (found->block != block_start()) {
    found->block = block_start();
    std::size_t total = 0;
    for (const Array& array : arrays) total += array.block == block_start() ? array.counted : 0;
    if (total > kSharedBytes) fail(std::to_string(total) + " bytes of shared memory, more than 48 KB");
  }
  return found->storage.get();
}

void Watch::read(const char* name, std::int64_t index) {
  const Moment here = now();
  const auto where = [&] { return std::string(name) + "[" + std::to_string(index) + "]"; };
  if (writer_.block < block_start()) fail(where() + " is read and was never written");
  if (here.races_with(writer_)) {
    fail("race: " + where() + " was written by thread " + std::to_string(writer_.thread) + " and no barrier since");
  }
  if (reader_.block != here.block) {
    reader_ = here;
    other_reader_ = {};
    several_ = false;
  } else if (!here.same_warp(reader_)) {
    other_reader_ = here;
  } else {
    several_ = reader_.warp == here.warp && (several_ || reader_.thread != here.thread);
    reader_ = here;
  }
}

void Watch::read_by_tensor_cores(const char* name, std::int64_t index) {
  read(name, index);
  if (fences(writer_.thread) == fences_) {
    fail(std::string(name) + "[" + std::to_string(index) + "] is read by tensor cores, and thread " +
         std::to_string(writer_.thread) + " has passed no fence since it wrote it");
  }
}

void Watch::write(const char* name, std::int64_t index) {
  const Moment here = now();
  const auto report = [&](const char* what, const Moment& before) {
    fail(std::string("race: ") + name + "[" + std::to_string(index) + "] was " + what + " by thread " +
         std::to_string(before.thread) + " and no barrier since");
  };
  if (here.races_with(writer_)) report("written", writer_);
  if (here.races_with(reader_)) report("read", reader_);
  if (here.races_with(other_reader_)) report("read", other_reader_);
  const bool together = reader_.block == here.block && reader_.same_warp(here) && reader_.warp == here.warp;
  if (together && several_) report("read", reader_);
  writer_ = here;
  fences_ = fences(here.thread);
}

}  // namespace simt
