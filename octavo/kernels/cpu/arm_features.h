// Which optional instructions an aarch64 CPU has, according to its system.
#pragma once

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace octavo {

#if defined(__linux__)

// Bits of AT_HWCAP and AT_HWCAP2: they are part of the kernel's interface, and older headers lack names for them.
inline bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
inline bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }

#elif defined(__APPLE__)

inline bool has_feature(const char* name) {
  int is_there = 0;
  size_t size = sizeof(is_there);
  return sysctlbyname(name, &is_there, &size, nullptr, 0) == 0 && is_there;
}
inline bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }

#else

inline bool has_dotprod() { return false; }
inline bool has_i8mm() { return false; }

#endif

}  // namespace octavo
#endif
