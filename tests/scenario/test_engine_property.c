/* 5,000 random operations on one engine: no byte is held that the ledger does not know, no budget is
 * broken, no frozen token lost, and at the end nothing is left. */
#include "property.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OPS 2000
#else
#define OPS 5000
#endif

int main(int argc, char **argv)
{
    return property_main(argc, argv, 7, OPS);
}
