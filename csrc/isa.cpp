#include "isa.h"

#include <map>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace onestem {

#define ONESTEM_TABLE(name) \
  namespace name {            \
  Kernels table();            \
  }
#ifdef ONESTEM_HAVE_AMX_BF16
ONESTEM_TABLE(amx_bf16)
#endif
#ifdef ONESTEM_HAVE_AVX512_BF16
ONESTEM_TABLE(avx512_bf16)
#endif
#ifdef ONESTEM_HAVE_AVX512
ONESTEM_TABLE(avx512)
#endif
#ifdef ONESTEM_HAVE_AVX2
ONESTEM_TABLE(avx2)
#endif
ONESTEM_TABLE(portable)

namespace {

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool bit(uint32_t word, int n) { return (word >> n & 1) != 0; }

// Which register files the operating system saves (XCR0): bits 1, 2 AVX; 5 to 7 AVX-512; 17, 18 AMX.
uint64_t saved_state() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

bool saves(uint64_t bits) { return (saved_state() & bits) == bits; }

bool has_avx2() {
  const uint32_t ecx = cpuid(1, 0).ecx;
  return saves(0x6) && bit(ecx, 12) && bit(ecx, 29) && bit(cpuid(7, 0).ebx, 5);  // FMA, F16C
}

#ifdef ONESTEM_EMULATED

bool has_avx512() { return has_avx2(); }
bool has_avx512_bf16() { return has_avx2(); }
bool has_amx_bf16() { return has_avx2(); }

#else

bool has_avx512() {
  const uint32_t ebx = cpuid(7, 0).ebx;
  return has_avx2() && saves(0xe6) && bit(ebx, 16) && bit(ebx, 17) && bit(ebx, 30) && bit(ebx, 31);
}

// VNNI came before it, so it is no set of its own.
bool has_avx512_bf16() {
  return has_avx512() && bit(cpuid(7, 1).eax, 5) && bit(cpuid(7, 0).ecx, 11);
}

// Linux gives the tile registers to a process that asks for them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx_bf16() {
  const uint32_t edx = cpuid(7, 0).edx;
  static const bool allowed = has_avx512_bf16() && saves(0x60000) && bit(edx, 22) &&
                              bit(edx, 24) && bit(edx, 25) && may_use_tiles();
  return allowed;
}

#endif

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx_bf16() { return false; }

#endif

// `table` is code for the instruction set itself: not to be called where it is not present.
struct Isa {
  const char* name;
  Kernels (*table)();
  bool (*present)();
};

constexpr Isa kIsas[] = {
#ifdef ONESTEM_HAVE_AMX_BF16
    {"amx_bf16", amx_bf16::table, has_amx_bf16},
#endif
#ifdef ONESTEM_HAVE_AVX512_BF16
    {"avx512_bf16", avx512_bf16::table, has_avx512_bf16},
#endif
#ifdef ONESTEM_HAVE_AVX512
    {"avx512", avx512::table, has_avx512},
#endif
#ifdef ONESTEM_HAVE_AVX2
    {"avx2", avx2::table, has_avx2},
#endif
    {"portable", portable::table, [] { return true; }},
};

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) names.emplace_back(isa.name);
  return names;
}

bool has_isa(const std::string& name) { return kernels_for(name) != nullptr; }

const Kernels* kernels_for(const std::string& name) {
  static const auto tables = [] {
    std::map<std::string, Kernels> present;
    for (const Isa& isa : kIsas) {
      if (isa.present()) present.emplace(isa.name, isa.table());
    }
    return present;
  }();
  const auto found = tables.find(name);
  return found == tables.end() ? nullptr : &found->second;
}

}  // namespace onestem
