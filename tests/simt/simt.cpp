// SPDX-License-Identifier: Apache-2.0
#include "simt.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "cuda_runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {
namespace {

constexpr std::size_t kStack = 128 * 1024;

enum class Status { ready, barrier, warp, group, done };

// Contexts start a fiber; after that _setjmp and _longjmp switch, which cost no system call.
struct Thread {
  jmp_buf at;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool started = false;
  Status status = Status::done;
  const char* file = "";
  int line = 0;
  std::uint64_t value = 0;
};

struct Warp {
  unsigned ready = 0, arrived = 0;  // one bit per lane
  std::uint32_t moment = 0;
  std::uint64_t values[kWarp];
};

struct State {
  Schedule schedule = Schedule::forward;
  std::uint64_t seed = 1;
  std::vector<Thread> threads = std::vector<Thread>(kMaxThreads);
  Warp warps[kMaxThreads / kWarp];
  int gathered[kMaxThreads / kWarpgroup];
  jmp_buf scheduler;
  const std::function<void()>* body = nullptr;
  std::string error;
  int current = 0, count = 0;
  std::size_t launch_bytes = 0, most_bytes = 0;  // of shared memory
  bool runs = false;
  const char* host = nullptr;                       // the stack of who launches, from here on
  std::uint32_t moment = 0, start = 0, launch = 0;  // barriers passed, over all blocks
};
State state;

std::uint64_t random_number() {
  state.seed ^= state.seed << 13;
  state.seed ^= state.seed >> 7;
  return state.seed ^= state.seed << 17;
}

std::string place(const Thread& thread) { return std::string(thread.file) + ":" + std::to_string(thread.line); }

std::string name_of(int thread) {
  return "thread " + std::to_string(thread) + " of block " + std::to_string(blockIdx.x);
}

void wake(int thread) {
  state.threads[thread].status = Status::ready;
  state.warps[thread / kWarp].ready |= 1u << thread % kWarp;
}

void leave(Status status) {
  Thread& self = state.threads[state.current];
  if (status != Status::ready) {
    self.status = status;
    state.warps[state.current / kWarp].ready &= ~(1u << state.current % kWarp);
  }
  if (!_setjmp(self.at)) _longjmp(state.scheduler, 1);
}

void fiber() {
  for (;;) {
    (*state.body)();
    leave(Status::done);
  }
}

void resume(int thread) {
  Thread& next = state.threads[thread];
  state.current = thread;
  threadIdx = {static_cast<unsigned>(thread), 0, 0};
  state.runs = !_setjmp(state.scheduler);
  if (!state.runs) return;
  if (next.started) _longjmp(next.at, 1);
  next.started = true;
  if (!next.stack) next.stack = std::make_unique<char[]>(kStack);
  getcontext(&next.context);
  next.context.uc_stack.ss_sp = next.stack.get();
  next.context.uc_stack.ss_size = kStack;
  next.context.uc_link = nullptr;
  makecontext(&next.context, fiber, 0);
  setcontext(&next.context);
}

int lowest(unsigned bits) { return __builtin_ctz(bits); }
int highest(unsigned bits) { return 31 - __builtin_clz(bits); }

// The first ready thread from a place on in one direction, around the end; -1 if there is none.
int next_ready(int from, int direction) {
  for (int k = 0; k < state.count; ++k) {
    const int thread = ((from + k * direction) % state.count + state.count) % state.count;
    if (state.warps[thread / kWarp].ready >> thread % kWarp & 1u) return thread;
  }
  return -1;
}

int pick() {
  const int warps = state.count / kWarp;
  switch (state.schedule) {
    case Schedule::forward:
      return next_ready(state.current + 1, 1);
    case Schedule::reverse:
      return next_ready(state.current - 1, -1);
    case Schedule::random:
      return next_ready(static_cast<int>(random_number() % state.count), 1);
    case Schedule::low_warp:
      for (int w = 0; w < warps; ++w) {
        if (state.warps[w].ready) return w * kWarp + lowest(state.warps[w].ready);
      }
      return -1;
    case Schedule::high_warp:
      for (int w = warps - 1; w >= 0; --w) {
        if (state.warps[w].ready) return w * kWarp + highest(state.warps[w].ready);
      }
      return -1;
  }
  return -1;
}

// Nobody can go on: the block is done, or all its threads wait at one barrier; anything else is an error.
bool settle() {
  int done = 0, waiting = 0, first = -1;
  for (int t = 0; t < state.count; ++t) {
    const Thread& thread = state.threads[t];
    done += thread.status == Status::done;
    waiting += thread.status == Status::barrier;
    if (thread.status == Status::barrier && first < 0) first = t;
    if (thread.status == Status::warp || thread.status == Status::group) {
      state.error = name_of(t) +
                    (thread.status == Status::warp ? " waits for its warp at " : " waits for its warpgroup at ") +
                    place(thread) + ", where not all lanes come";
      return false;
    }
  }
  if (waiting == 0) return false;
  const Thread& leader = state.threads[first];
  if (done > 0) {
    state.error = name_of(first) + " waits at the barrier " + place(leader) + ", but " + std::to_string(done) +
                  " threads have exited";
    return false;
  }
  for (int t = first; t < state.count; ++t) {
    if (state.threads[t].line != leader.line || std::string(state.threads[t].file) != leader.file) {
      state.error = "two barriers at once: " + place(leader) + " and " + place(state.threads[t]);
      return false;
    }
  }
  ++state.moment;
  for (int t = 0; t < state.count; ++t) wake(t);
  return true;
}

void run_block() {
  state.start = ++state.moment;
  for (int t = 0; t < state.count; ++t) wake(t);
  for (int w = 0; w < state.count / kWarp; ++w) state.warps[w].arrived = 0;
  std::fill(std::begin(state.gathered), std::end(state.gathered), 0);
  state.current = state.schedule == Schedule::reverse ? 0 : state.count - 1;
  do {
    for (int thread = pick(); thread >= 0; thread = pick()) {
      resume(thread);
      if (!state.error.empty()) return;
    }
  } while (settle());
}

}  // namespace

void configure(Schedule schedule, unsigned seed) {
  state.schedule = schedule;
  state.seed = 0x9e3779b97f4a7c15u ^ (seed + 1);
}

void run(unsigned blocks, unsigned threads, const std::function<void()>& body, std::size_t launch_bytes,
         std::size_t most_bytes) {
  if (threads == 0 || threads > kMaxThreads || threads % kWarp != 0) {
    throw std::runtime_error("a block needs a multiple of 32 threads, at most 1024, found " + std::to_string(threads));
  }
  gridDim = dim3(blocks);
  blockDim = dim3(threads);
  state.body = &body;
  state.count = static_cast<int>(threads);
  state.error.clear();
  state.launch = state.moment + 1;
  state.launch_bytes = launch_bytes;
  state.most_bytes = most_bytes;
  state.host = static_cast<const char*>(__builtin_frame_address(0));
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (state.schedule == Schedule::reverse || state.schedule == Schedule::high_warp) {
    std::reverse(order.begin(), order.end());
  } else if (state.schedule == Schedule::random) {
    for (unsigned i = blocks; i > 1; --i) std::swap(order[i - 1], order[random_number() % i]);
  }
  for (const unsigned block : order) {
    blockIdx = {block, 0, 0};
    run_block();
    if (state.error.empty()) continue;
    for (Thread& thread : state.threads) thread.started = false;  // they are in the middle of something
    throw std::runtime_error(state.error);
  }
}

void fail(const std::string& message) {
  state.error = name_of(state.current) + ": " + message;
  _longjmp(state.scheduler, 1);
}

void barrier(const char* file, int line) {
  Thread& self = state.threads[state.current];
  self.file = file;
  self.line = line;
  leave(Status::barrier);
}

void exchange(unsigned mask, std::uint64_t value, const char* file, int line) {
  Thread& self = state.threads[state.current];
  Warp& warp = state.warps[state.current / kWarp];
  self.file = file;
  self.line = line;
  self.value = value;
  if (mask != 0xffffffffu) fail("partial warp mask at " + place(self));
  if (warp.arrived) {
    const Thread& first = state.threads[state.current / kWarp * kWarp + lowest(warp.arrived)];
    if (first.line != line || std::string(first.file) != file) {
      fail("lanes of one warp wait at two places: " + place(first) + " and " + place(self));
    }
  }
  warp.arrived |= 1u << state.current % kWarp;
  if (warp.arrived != 0xffffffffu) return leave(Status::warp);
  const int lane0 = state.current / kWarp * kWarp;
  for (int lane = 0; lane < kWarp; ++lane) {
    warp.values[lane] = state.threads[lane0 + lane].value;
    wake(lane0 + lane);
  }
  warp.arrived = 0;
  ++warp.moment;
  leave(Status::ready);
}

void gather(const std::function<void()>& act, const char* file, int line) {
  Thread& self = state.threads[state.current];
  const int group = state.current / kWarpgroup, first = group * kWarpgroup;
  self.file = file;
  self.line = line;
  if (first + kWarpgroup > state.count) fail("fewer than 128 threads at " + place(self));
  if (++state.gathered[group] < kWarpgroup) return leave(Status::group);
  state.gathered[group] = 0;
  act();
  for (int t = first; t < first + kWarpgroup; ++t) wake(t);
  leave(Status::ready);
}

std::uint64_t peer(int lane) { return state.warps[state.current / kWarp].values[lane]; }

Moment now() {
  return {state.moment, state.warps[state.current / kWarp].moment, static_cast<std::int16_t>(state.current)};
}

std::uint32_t block_start() { return state.start; }
std::uint32_t launch_start() { return state.launch; }
std::size_t launch_bytes() { return state.launch_bytes; }
std::size_t most_bytes() { return state.most_bytes; }
bool runs() { return state.runs; }

bool on_stack(const void* address) {
  const auto lies_in = [&](const char* stack) {
    return static_cast<std::size_t>(static_cast<const char*>(address) - stack) < kStack;
  };
  return lies_in(state.threads[state.current].stack.get()) || lies_in(state.host);
}

}  // namespace simt
