// Included ahead of all else in a library for a wheel: parts of the C and C++ libraries that GCC 12's headers call and
// that a system of manylinux_2_28 may lack, whose glibc is 2.28 and whose libstdc++ is GCC 8's. The library has its own,
// as those that Red Hat's compilers build for such systems. Names are hidden: nobody else finds them.

#ifndef __OPTIMIZE__
#error "a destructor that is not inline would call itself"
#endif

#include <exception>
#include <new>
#include <sstream>

__asm__(".symver dlopen, dlopen@GLIBC_2.2.5\n"
        ".symver dlsym, dlsym@GLIBC_2.2.5");

// glibc 2.32: false, so that counters of references are atomic.
__asm__(".hidden __libc_single_threaded\n"
        ".local __libc_single_threaded\n"
        ".comm __libc_single_threaded, 1, 1");

// GCC 9 and 11: constructors and results of streams.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

// GCC 11: counts of an exception's owners. GCC 8 counts in a constructor, and in the destructor, which today's headers
// have inline.
__asm__(".hidden _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv\n"
        ".hidden _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv\n"
        ".hidden _ZSt28__throw_bad_array_new_lengthv\n"
        ".symver pygraph_destroy_exception, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
extern "C" void pygraph_destroy_exception(std::exception_ptr*) noexcept;

void std::__exception_ptr::exception_ptr::_M_addref() noexcept {
  alignas(exception_ptr) char never_destroyed[sizeof(exception_ptr)];
  ::new (never_destroyed) exception_ptr(_M_exception_object);
}
void std::__exception_ptr::exception_ptr::_M_release() noexcept {
  pygraph_destroy_exception(this);
}

// GCC 11: the size of an array is no size.
void std::__throw_bad_array_new_length() {
  throw bad_array_new_length();
}
