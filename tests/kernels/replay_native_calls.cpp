// Makes recorded calls of the native library again, on another machine: replay_native_calls RECORDING RESULTS.
// native_calls.py writes the recording, and describes it; integers are little-endian.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "product.h"
#include "sampling.h"
#include "step.h"

namespace {

[[noreturn]] void fail(const char* why, const std::string& what = "") {
  fprintf(stderr, "replay: %s %s\n", why, what.c_str());
  exit(2);
}

FILE *recording, *results;

template <typename T>
T next() {
  T value;
  if (fread(&value, sizeof value, 1, recording) != 1) fail("the recording ends too early");
  return value;
}

std::string next_name() {
  std::string name(next<uint8_t>(), ' ');
  if (fread(name.data(), 1, name.size(), recording) != name.size()) fail("the recording ends too early");
  return name;
}

template <typename T>
void write(const T* from, size_t count) {
  if (fwrite(from, sizeof(T), count, results) != count) fail("cannot write the results");
}

// Memory of the recorded process, as aligned as it was there, and as near as that allows to a page that must not be read.
std::map<int64_t, uint8_t*> memory;

uint8_t* allocate(int64_t size, int64_t residue) {
  const int64_t page = sysconf(_SC_PAGESIZE), pages = (size + 64 + page - 1) / page * page;
  void* all = mmap(nullptr, static_cast<size_t>(pages + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) fail("no memory");
  uint8_t* end = static_cast<uint8_t*>(all) + pages;
  if (mprotect(end, static_cast<size_t>(page), PROT_NONE) != 0) fail("cannot protect a page");
  uint8_t* start = end - size;
  return start - (reinterpret_cast<uintptr_t>(start) - static_cast<uintptr_t>(residue)) % 64;
}

uint8_t* at(int64_t id, int64_t offset) {
  const auto found = memory.find(id);
  if (found == memory.end()) fail("unknown memory", std::to_string(id));
  return found->second + offset;
}

octavo::Threads* pool_of(int64_t num_threads) {
  static std::map<int64_t, octavo::Threads*> pools;
  octavo::Threads*& pool = pools[num_threads];
  if (!pool) pool = octavo_threads_new(static_cast<int>(num_threads), -1);
  return pool;
}

// An argument: an integer, the bits of a float, or an address.
template <typename T>
T argument() {
  const char kind = next<char>();
  const int64_t number = next<int64_t>();
  if constexpr (std::is_pointer_v<T>) {
    if (kind == 'T') return reinterpret_cast<T>(pool_of(number));
    if (kind == 'P') return reinterpret_cast<T>(at(number, next<int64_t>()));
    if (kind != 'N' || number != 0) fail("an address was expected");
    return nullptr;
  } else if constexpr (std::is_floating_point_v<T>) {
    static_assert(sizeof(T) == 4, "the interface has floats only");
    if (kind != 'F') fail("a float was expected");
    T value;
    memcpy(&value, &number, sizeof value);
    return value;
  } else {
    if (kind != 'N') fail("an integer was expected");
    return static_cast<T>(number);
  }
}

template <typename Result, typename... Arguments>
void call(Result (*function)(Arguments...)) {
  std::tuple<Arguments...> arguments{argument<Arguments>()...};  // braces: in the order of the recording
  if constexpr (std::is_void_v<Result>) {
    std::apply(function, arguments);
  } else {
    const int64_t result = static_cast<int64_t>(std::apply(function, arguments));
    write(&result, 1);
  }
}

#define OCTAVO_CALL(name) {#name, [] { call(name); }}
const std::map<std::string, void (*)()> kFunctions = {
    OCTAVO_CALL(octavo_pack), OCTAVO_CALL(octavo_pack_quantised), OCTAVO_CALL(octavo_read_columns),
    OCTAVO_CALL(octavo_prepare), OCTAVO_CALL(octavo_product), OCTAVO_CALL(octavo_products),
    OCTAVO_CALL(octavo_read_all), OCTAVO_CALL(octavo_rms_norm), OCTAVO_CALL(octavo_rms_norm_add),
    OCTAVO_CALL(octavo_cap), OCTAVO_CALL(octavo_silu_mul), OCTAVO_CALL(octavo_rms_norm_prepare),
    OCTAVO_CALL(octavo_attention), OCTAVO_CALL(octavo_qk_norm_rope_store), OCTAVO_CALL(octavo_run),
    OCTAVO_CALL(octavo_uniforms), OCTAVO_CALL(octavo_sample),
};

void replay_all() {
  for (int command; (command = fgetc(recording)) != EOF;) {
    if (command == 'I') {  // use an instruction set
      const std::string name = next_name();
      if (!octavo_use_isa(name.c_str())) fail("this CPU has no", name);
    } else if (command == 'M') {  // memory: its contents from now on
      const int64_t id = next<int64_t>(), residue = next<int64_t>(), size = next<int64_t>();
      if (!memory.count(id)) memory[id] = allocate(size, residue);
      if (fread(memory[id], 1, static_cast<size_t>(size), recording) != static_cast<size_t>(size))
        fail("the recording ends too early");
    } else if (command == 'A') {  // an address in memory
      const int64_t id = next<int64_t>(), offset = next<int64_t>(), target = next<int64_t>();
      uint8_t* address = at(target, next<int64_t>());
      memcpy(at(id, offset), &address, sizeof address);
    } else if (command == 'C') {
      const std::string name = next_name();
      const auto found = kFunctions.find(name);
      if (found == kFunctions.end()) fail("no function", name);
      found->second();
    } else if (command == 'R') {  // a result: bytes of memory
      const int64_t id = next<int64_t>(), offset = next<int64_t>(), size = next<int64_t>();
      write(at(id, offset), static_cast<size_t>(size));
    } else {
      fail("no command", std::to_string(command));
    }
  }
}

}  // namespace

int main(int num_arguments, char** arguments) {
  if (num_arguments == 1) {
    printf("%s\n", octavo_isa());
    return 0;
  }
  if (num_arguments != 3) fail("usage: replay_native_calls [RECORDING RESULTS]");
  recording = fopen(arguments[1], "rb");
  results = fopen(arguments[2], "wb");
  if (!recording || !results) fail("cannot open", !recording ? arguments[1] : arguments[2]);
  replay_all();
  return fclose(results) == 0 ? 0 : 2;
}
