// Maps files without reading them: preloaded, so that opening a model whose weights are holes costs no memory.
//
// llama.cpp asks the system to read a model ahead; of a sparse file that would be gigabytes of zeros in the page cache.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) noexcept {
    return reinterpret_cast<void *>(syscall(SYS_mmap, address, size, protection, flags & ~MAP_POPULATE, file, offset));
}

extern "C" void *mmap64(void *address, size_t size, int protection, int flags, int file, off_t offset) noexcept {
    return mmap(address, size, protection, flags, file, offset);
}

extern "C" int posix_madvise(void *, size_t, int) noexcept { return 0; }

extern "C" int posix_fadvise(int, off_t, off_t, int) noexcept { return 0; }
