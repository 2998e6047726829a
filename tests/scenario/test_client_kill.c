/* Twenty times kill -9 at random moments, and nothing that was acknowledged is lost. */
#include "kills.h"

int main(int argc, char **argv)
{
    return kills_main(argc, argv, 1, 20);
}
